"""Inputs of the gated delta rule as other projects take them, gates before their activation; it calls no peer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from day0.bench.ops.gated_delta import HEADS, KEY_DIM, SCALE, VALUE_DIM, recurrence
from day0.bench.ops.peers.peer import normal, relative_error

LOWER_BOUND = -5.0
# Tokens of a long sequence that are held against the definition.
CHECKED_TOKENS = 384
LIMIT = 0.03


@dataclass(frozen=True, slots=True)
class Size:
    """What a shape's name says: a gate a channel (KDA) or a head (GDN), sequences, and new tokens of each."""

    channels: bool
    sequences: int
    tokens: int

    @classmethod
    def of(cls, name: str) -> Self | None:
        """Read from a name such as `KDA 64 heads, 8 x 1k` or `GDN 64 heads, batch 128`."""
        found = re.fullmatch(r"(KDA|GDN).* 64 heads, (?:batch (\d+)|(?:(\d+) x )?(\d+)k)", name)
        if found is None:
            return None
        if found[2]:
            return cls(found[1] == "KDA", int(found[2]), 1)
        return cls(found[1] == "KDA", int(found[3] or 1), int(found[4]) * 1024)


class RawInputs:
    """q, k, v, raw gates and beta `[1, T, H, 128]` packed (decode `[B, 1, H, 128]`); states `[B, H, K, V]` float32.

    log gate = -5 sigmoid(exp(log_rate) * (raw + bias)), beta = sigmoid(raw beta).
    """

    def __init__(self, size: Size, log_rate: Tensor, bias: Tensor) -> None:
        self.size, self.log_rate, self.bias = size, log_rate, bias
        batch, tokens = (size.sequences, 1) if size.tokens == 1 else (1, size.sequences * size.tokens)
        self.q, self.k, self.v, self.raw = (normal(batch, tokens, HEADS, KEY_DIM) for _ in range(4))
        self.raw_beta = normal(batch, tokens, HEADS)
        # Prefill begins with no state, as most do; decode goes on.
        fill = torch.randn if size.tokens == 1 else torch.zeros
        self.state = fill(size.sequences, HEADS, KEY_DIM, VALUE_DIM, device="cuda")

    @property
    def size_bytes(self) -> float:
        """Five rows of 128 a head, beta, and the state: written, and read too where there is one."""
        rows = self.q.shape[0] * self.q.shape[1] * HEADS
        return rows * (5 * KEY_DIM * 2 + 2) + self.state.nbytes * (2 if self.size.tokens == 1 else 1)

    @property
    def bounds(self) -> Tensor | None:
        """Where packed sequences begin and end; None for one."""
        if self.size.sequences == 1 or self.size.tokens == 1:
            return None
        return torch.arange(0, self.q.shape[1] + 1, self.size.tokens, device="cuda")

    @property
    def scalar_gates(self) -> Tensor:
        """Log gates of one a head `[1, T, H]`."""
        return -functional.softplus(self.raw[..., 0].float())

    def _log_gates(self) -> Tensor:
        if not self.size.channels:
            return self.scalar_gates[..., None].expand_as(self.raw)
        return LOWER_BOUND * torch.sigmoid(self.log_rate.exp()[:, None] * (self.raw.float() + self.bias))

    def error(self, out: Tensor, state: Tensor | None = None) -> float:
        """Of the first tokens of the first and of the last sequence; of decode all, states too."""
        g, beta = self._log_gates(), torch.sigmoid(self.raw_beta.float())
        tensors = {"q": self.q, "k": self.k, "v": self.v, "g": g, "beta": beta}
        if self.size.tokens == 1:
            flat = {name: x[:, 0] for name, x in tensors.items()} | {"state": self.state}
            wanted, wanted_state = recurrence(flat, list(range(self.size.sequences + 1)))
            off = 0.0 if state is None else relative_error(state, wanted_state)
            return max(off, relative_error(out[:, 0], wanted))
        worst = 0.0
        for start in {0, (self.size.sequences - 1) * self.size.tokens}:
            part = slice(start, start + min(CHECKED_TOKENS, self.size.tokens))
            flat = {name: x[0, part] for name, x in tensors.items()} | {"state": self.state[:1]}
            worst = max(worst, relative_error(out[0, part], recurrence(flat, [0, part.stop - start])[0]))
        return worst if bool(out.isfinite().all()) else float("inf")


def rates() -> tuple[Tensor, Tensor]:
    """log_rate `[H]` and bias `[H, 128]`, float32."""
    return torch.randn(HEADS, device="cuda") * 0.3, torch.randn(HEADS, KEY_DIM, device="cuda") * 0.3


__all__ = ["LIMIT", "LOWER_BOUND", "SCALE", "RawInputs", "Size", "rates"]
