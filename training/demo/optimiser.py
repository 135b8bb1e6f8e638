"""Flat float32 masters with low-precision working copies, and AdamW over them; it knows only names and shapes.

All parameters lie in one flat master, in four parts: low precision and float32, each with and without decay. The parts
are what AdamW sees, so a step is a handful of kernels, safe in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from training.demo.model import keeps_float32

# Every tensor starts at a multiple of this, so that matrix products find their operands aligned.
ALIGN_ELEMENTS = 64
CLIP_NORM = 1.0
DECAY = 0.05
BETAS = (0.9, 0.98)
EPS = 1e-9


class FlatParameters:
    """A model's parameters as leaves in `low_dtype` (float32 where upstream keeps it), backed by one float32 master.

    `leaves` has them by upstream's names, zero-sized ones left out. `grads` are float32 views of the flat gradient.
    """

    def __init__(self, model: nn.Module, device: torch.device, low_dtype: torch.dtype) -> None:
        named = {name: p.detach() for name, p in model.named_parameters() if p.numel()}
        parts: list[list[str]] = [[], [], [], []]
        for name, p in named.items():
            plain = p.ndim < 2 or "_hc." in name or name.endswith(("conv1d.weight", "compress_ape"))
            parts[2 * keeps_float32(name) + plain].append(name)
        spans: dict[str, tuple[int, int]] = {}
        ends, end = [], 0
        for part in parts:
            for name in part:
                spans[name] = (end, named[name].numel())
                end += -(-named[name].numel() // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
            ends.append(end)
        self.low_elements = ends[1]
        self.master = torch.zeros(end, device=device)
        self.flat_grad = torch.zeros_like(self.master)
        self.working = (
            torch.zeros(self.low_elements, device=device, dtype=low_dtype),
            torch.zeros(end - self.low_elements, device=device),
        )
        self.shapes = {name: p.shape for name, p in named.items()}
        self.views: dict[str, Tensor] = {}
        self.grads: dict[str, Tensor] = {}
        self.leaves: dict[str, Tensor] = {}
        for name, (start, count) in spans.items():
            shape = self.shapes[name]
            self.views[name] = self.master[start : start + count].view(shape)
            self.grads[name] = self.flat_grad[start : start + count].view(shape)
            self.views[name].copy_(named[name])
            low = start < self.low_elements
            source, at = (self.working[0], start) if low else (self.working[1], start - self.low_elements)
            self.leaves[name] = source[at : at + count].view(shape).detach().requires_grad_()
        self.parts = [(first, last) for first, last in zip([0, *ends[:-1]], ends, strict=True)]
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copies the master to the working leaves."""
        self.working[0].copy_(self.master[: self.low_elements])
        self.working[1].copy_(self.master[self.low_elements :])


class Optimiser:
    """AdamW over flat parameters, with the gradient's norm clipped; a step whose gradient is not finite is left out.

    `lr` is a float32 scalar on the device: write it before a step or a replay. `skipped` counts steps left out.
    """

    def __init__(self, parameters: FlatParameters) -> None:
        self.parameters = parameters
        device = parameters.master.device
        self.lr = torch.zeros((), device=device)
        self.norm = torch.zeros((), device=device)
        self.skipped = torch.zeros((), device=device)
        groups = []
        for number, (first, last) in enumerate(parameters.parts):
            if last == first:
                continue
            master = nn.Parameter(parameters.master[first:last])
            master.grad = parameters.flat_grad[first:last]
            groups.append({"params": [master], "weight_decay": 0.0 if number % 2 else DECAY})
        capturable = device.type == "cuda"
        self.adamw: Any = torch.optim.AdamW(groups, lr=self.lr, betas=BETAS, eps=EPS, fused=True, capturable=capturable)

    @torch.no_grad()
    def step(self, grads: dict[str, Tensor | None]) -> None:
        """One step along gradients by name; None counts as zero."""
        flat = self.parameters
        present = [(flat.grads[name], grad) for name, grad in grads.items() if grad is not None]
        torch._foreach_copy_([view for view, _ in present], [grad for _, grad in present])
        norm = torch.linalg.vector_norm(flat.flat_grad)
        finite = torch.isfinite(norm)
        # Zero, not NaN: what lies between tensors would stay NaN for good.
        flat.flat_grad.mul_(torch.where(finite, (CLIP_NORM / (norm + 1e-6)).clamp(max=1.0), 0.0))
        bad = 1.0 - finite.float()
        self.norm.copy_(norm)
        self.skipped.add_(bad)
        # What GradScaler sets too: the fused step leaves everything as it is where this is 1.
        self.adamw.found_inf = bad
        self.adamw.grad_scale = None
        self.adamw.step()
        flat.refresh()

    @torch.no_grad()
    def forget(self) -> None:
        """Zeroes what was gathered so far, in place: graphs keep the addresses."""
        self.skipped.zero_()
        for state in self.adamw.state.values():
            for value in state.values():
                value.zero_()


@torch.no_grad()
def balance(router_bias: Tensor, counts: Tensor, rate: float) -> None:
    """Moves each expert's choice bias by ±rate toward even load; bias and counts float32 `[layers, E]`."""
    router_bias.add_(torch.sign(counts.mean(1, keepdim=True) - counts), alpha=rate)
