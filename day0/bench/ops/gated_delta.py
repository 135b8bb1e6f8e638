"""The gated delta rule and the short convolution at model sizes, checked against float64; it times nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from day0.bench.ops.shape import Shape
from day0.bench.ops.timing import sets_for
from day0_kernels.gated_delta import triton as delta
from day0_kernels.short_conv import triton as convolution

HEADS, KEY_DIM, VALUE_DIM, CHANNELS, TAPS = 64, 128, 128, 3 * 64 * 128, 4
SCALE, L2NORM_EPS, CHUNK = KEY_DIM**-0.5, 1e-6, 16
# Relative to float64. Rounding an output to bfloat16 alone has 1.66e-3; the limit is 1.5 times that.
MOST_OUTPUT_ERROR, MOST_STATE_ERROR = 2.5e-3, 1e-3

Gates = Literal["KDA", "KDA bf16 gates", "GDN"]


def relative(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||; infinite where got is not finite."""
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm()) if bool(got.isfinite().all()) else math.inf


def recurrence(made: Mapping[str, Tensor], bounds: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The definition in float64, token by token, sequence b from and to state b.

    Outputs `[T, H, V]` and states `[B, H, K, V]`.
    """
    wide = {name: made[name].double() for name in ("q", "k", "v", "g", "beta")}
    q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + L2NORM_EPS) for x in (wide["q"], wide["k"]))
    states, out = made["state"].double(), torch.empty_like(wide["v"])
    lengths = [end - begin for begin, end in itertools.pairwise(bounds)]
    for step in range(max(lengths)):
        live = [b for b, length in enumerate(lengths) if step < length]
        on = torch.tensor(live, device=states.device)
        t = torch.tensor([bounds[b] + step for b in live], device=states.device)
        held = states[on] * wide["g"][t].exp()[..., None]
        change = (wide["v"][t] - torch.einsum("bhk,bhkv->bhv", k[t], held)) * wide["beta"][t][..., None]
        held += k[t][..., None] * change[:, :, None]
        out[t] = torch.einsum("bhk,bhkv->bhv", q[t], held) * SCALE
        states[on] = held
    return out, states


def delta_inputs(rows: int, sequences: int, gates: Gates, device: str = "cuda") -> dict[str, Tensor]:
    """q, k, v, beta bfloat16; log gates float32 or bfloat16 a channel, or float32 a head (stride 0); state float32."""
    normal = partial(torch.randn, device=device)
    made = {name: normal(rows, HEADS, KEY_DIM).bfloat16() for name in ("q", "k", "v")}
    g = -5 * torch.sigmoid(0.4 * normal(rows, HEADS, KEY_DIM))
    if gates == "GDN":
        g = torch.nn.functional.logsigmoid(3 + normal(rows, HEADS, 1)).expand(-1, -1, KEY_DIM)
    return made | {
        "g": g.bfloat16() if gates == "KDA bf16 gates" else g,
        "beta": torch.sigmoid(normal(rows, HEADS)).bfloat16(),
        "state": 0.1 * normal(sequences, HEADS, KEY_DIM, VALUE_DIM),
        "state_slots": torch.arange(sequences, dtype=torch.int32, device=device),
    }


def bytes_of(made: Mapping[str, Tensor]) -> float:
    """Inputs once, the output once, states read and written."""
    total = sum(made[name].untyped_storage().nbytes() for name in ("q", "k", "v", "g", "beta"))
    return total + made["v"].nbytes + 2 * made["state"].nbytes


def flops_of(rows: int, decode: bool) -> float:
    """Of decode three products with the state; of prefill those of chunks of 16: in the chunk, with state, solve."""
    per_head = 3 * KEY_DIM * VALUE_DIM
    if not decode:
        per_head += 5 * CHUNK * KEY_DIM + CHUNK * CHUNK // 3
    return 2.0 * rows * HEADS * per_head


def delta_shape(lengths: Sequence[int], gates: Gates, name: str, *, decode: bool = False) -> Shape:
    """Packed sequences of `lengths` new tokens, each with a state of its own; one token each for decode."""
    bounds = [0, *itertools.accumulate(lengths)]
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    made = delta_inputs(bounds[-1], len(lengths), gates)

    def call(inputs: Mapping[str, Any]) -> Tensor:
        if decode:
            return delta.gated_delta_decode(**inputs, scale=SCALE)
        return delta.gated_delta_prefill(**inputs, cu_seqlens=cu_seqlens, scale=SCALE)

    def checked() -> tuple[Tensor, Tensor]:
        mine = {**made, "state": made["state"].clone()}
        return call(mine), mine["state"]

    def error(found: tuple[Tensor, Tensor]) -> float:
        wanted, wanted_state = recurrence(made, bounds)
        return relative(found[0], wanted) if relative(found[1], wanted_state) <= MOST_STATE_ERROR else math.inf

    count = sets_for(bytes_of(made))
    # The first set is checked before it is timed, and its state is as made until then.
    sets = [made, *(delta_inputs(bounds[-1], len(lengths), gates) for _ in range(count - 1))]
    return Shape(
        "gated_delta_decode" if decode else "gated_delta_prefill",
        name,
        [partial(call, inputs) for inputs in sets],
        bytes_of(made),
        error,
        MOST_OUTPUT_ERROR,
        flops_of(bounds[-1], decode),
        checked=checked,
    )


def convolution_shape(rows: int, decode: bool) -> Shape:
    """Three streams of 64 x 128 channels: `rows` tokens of one sequence, or one of each of `rows` sequences."""
    sequences = rows if decode else 1
    weight = torch.randn(CHANNELS, TAPS, device="cuda").bfloat16()
    states = torch.randn(sequences, CHANNELS, TAPS - 1, device="cuda").bfloat16()
    slots = torch.arange(sequences, dtype=torch.int32, device="cuda")
    bounds = torch.tensor([0, rows], dtype=torch.int32, device="cuda")
    size_bytes = 2 * rows * CHANNELS * 2 + weight.nbytes + 2 * states.nbytes

    def call(x: Tensor, state: Tensor) -> Tensor:
        if decode:
            return convolution.short_conv_decode(x, weight, state, slots)
        return convolution.short_conv_prefill(x, weight, state, slots, bounds)

    sets = [
        (torch.randn(rows, CHANNELS, device="cuda").bfloat16(), states.clone()) for _ in range(sets_for(size_bytes))
    ]
    first = sets[0][0]

    def checked() -> tuple[Tensor, Tensor]:
        state = states.clone()
        return call(first, state), state

    def error(found: tuple[Tensor, Tensor]) -> float:
        wide = first.double()[:, None] if decode else first.double()[None]
        extended = torch.cat([states.double().transpose(1, 2), wide], 1)
        taps = [extended[:, j : j + wide.shape[1]] * weight[:, j].double() for j in range(TAPS)]
        wanted = torch.nn.functional.silu(torch.stack(taps).sum(0)).reshape(rows, CHANNELS)
        same_state = torch.equal(found[1].double(), extended[:, -TAPS + 1 :].transpose(1, 2))
        return relative(found[0], wanted) if same_state else math.inf

    return Shape(
        "short_conv_decode" if decode else "short_conv_prefill",
        f"{CHANNELS} channels, {f'batch {rows}' if decode else f'{rows // 1024}k'}",
        [partial(call, *pair) for pair in sets],
        size_bytes,
        error,
        MOST_OUTPUT_ERROR,
        checked=checked,
    )


PREFILLS: tuple[tuple[str, Sequence[int], Gates], ...] = (
    ("KDA 64 heads, 4k", [4096], "KDA"),
    ("KDA 64 heads, 8k", [8192], "KDA"),
    ("KDA 64 heads, 8 x 1k", [1024] * 8, "KDA"),
    ("KDA 64 heads, 7 uneven of 4k", [1, 15, 16, 17, 130, 600, 3317], "KDA"),
    ("KDA bf16 gates 64 heads, 4k", [4096], "KDA bf16 gates"),
    ("KDA bf16 gates 64 heads, 8k", [8192], "KDA bf16 gates"),
    ("GDN 64 heads, 4k", [4096], "GDN"),
)


def shapes() -> Iterator[Callable[[], Shape]]:
    """Prefill and decode of KDA and GDN with 64 heads of 128 x 128, and the convolution in front of them."""
    for name, lengths, gates in PREFILLS:
        yield partial(delta_shape, lengths, gates, name)
    for batch in (1, 32, 128):
        yield partial(delta_shape, [1] * batch, "KDA", f"KDA 64 heads, batch {batch}", decode=True)
    yield partial(delta_shape, [1] * 128, "GDN", "GDN 64 heads, batch 128", decode=True)
    yield partial(convolution_shape, 4096, False)
    for batch in (32, 128):
        yield partial(convolution_shape, batch, True)
