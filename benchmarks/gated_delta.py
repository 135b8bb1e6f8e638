"""Checks and times the gated delta and short convolution kernels on one NVIDIA GPU; it reads no model.

    PYTHONPATH=.:kernels python -m benchmarks.gated_delta [--sweep] [--seconds 100] [--json out.json]

Every shape is checked against float64 first; a wrong one has no time. Times are medians of CUDA graph replays over
input sets that do not stay in L2; floor = bytes / copy rate, the copy measured in the same run.
`--sweep` checks and times other launch configurations too, until `--seconds` are spent.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu_timing import copy_bytes_per_second, median_us, poison, sets_for
from day0_kernels.gated_delta import triton as delta
from day0_kernels.short_conv import triton as convolution

HEADS, KEY_DIM, VALUE_DIM, CHANNELS, TAPS = 64, 128, 128, 3 * 64 * 128, 4
SCALE = KEY_DIM**-0.5
POISON_BYTES = 1 << 30
# Relative errors ||got - want|| / ||want||. A bfloat16 output alone has 1.66e-3; the bound is 1.5 times that.
MOST_OUTPUT_ERROR, MOST_STATE_ERROR = 2.5e-3, 1e-3

SWEEPS: Mapping[str, Sequence[Mapping[str, int]]] = {
    "decode_step": [
        {"BLOCK_V": columns, "num_warps": warps}
        for columns, warps in ((32, 4), (16, 1), (16, 2), (64, 4), (64, 8), (128, 8), (32, 1), (128, 16))
    ],
    "state_pass": [
        {"BLOCK_V": columns, "num_warps": warps, "num_stages": stages}
        for columns, warps, stages in ((64, 4, 2), (64, 4, 4), (128, 8, 3), (32, 2, 3), (32, 4, 3), (16, 1, 3))
    ],
    "chunk_terms": [
        {"SLICE": columns, "num_warps": warps, "num_stages": stages}
        for columns, warps, stages in ((32, 1, 1), (32, 2, 1), (16, 1, 2), (16, 2, 1), (64, 4, 1), (32, 1, 2))
    ],
}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table; `error` and `state_error` relative against float64, `share` of the floor in percent."""

    operator: str
    shape: str
    configuration: str
    error: float
    state_error: float
    us: float | None
    floor_us: float
    share: float | None


def _relative(got: Tensor, want: Tensor) -> float:
    got, want = got.double(), want.double()
    return float((got - want).norm() / want.norm()) if bool(got.isfinite().all()) else math.inf


def recurrence(made: Mapping[str, Tensor], bounds: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Float64 token by token, sequence b from and to state b: outputs [T, H, V] and states [B, H, K, V]."""
    wide = {name: made[name].double() for name in ("q", "k", "v", "g", "beta")}
    q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (wide["q"], wide["k"]))
    states = made["state"].double()
    out = torch.empty_like(wide["v"])
    lengths = [end - begin for begin, end in itertools.pairwise(bounds)]
    for step in range(max(lengths)):
        on = torch.tensor([b for b, length in enumerate(lengths) if step < length], device="cuda")
        t = torch.tensor([bounds[b] + step for b in on.tolist()], device="cuda")
        held = states[on] * wide["g"][t].exp()[..., None]
        change = (wide["v"][t] - torch.einsum("bhk,bhkv->bhv", k[t], held)) * wide["beta"][t][..., None]
        held += k[t][..., None] * change[:, :, None]
        out[t] = torch.einsum("bhk,bhkv->bhv", q[t], held) * SCALE
        states[on] = held
    return out, states


def delta_inputs(rows: int, sequences: int, gates: str) -> dict[str, Tensor]:
    """q, k, v, beta bfloat16; g float32 a channel ("kda"), a head ("gdn", stride 0), or bfloat16 ("kda bf16")."""
    normal = lambda *shape: torch.randn(*shape, device="cuda")  # noqa: E731
    made = {name: normal(rows, HEADS, KEY_DIM).bfloat16() for name in ("q", "k", "v")}
    g = -5 * torch.sigmoid(0.4 * normal(rows, HEADS, KEY_DIM))
    if gates == "gdn":
        g = torch.nn.functional.logsigmoid(3 + normal(rows, HEADS, 1)).expand(-1, -1, KEY_DIM)
    return made | {
        "g": g.bfloat16() if gates == "kda bf16" else g,
        "beta": torch.sigmoid(normal(rows, HEADS)).bfloat16(),
        "state": 0.1 * normal(sequences, HEADS, KEY_DIM, VALUE_DIM),
        "state_slots": torch.arange(sequences, dtype=torch.int32, device="cuda"),
    }


def _bytes(made: Mapping[str, Tensor]) -> float:
    """Bytes of a call: inputs once, output once, state read and written."""
    total = sum(made[name].untyped_storage().nbytes() for name in ("q", "k", "v", "g", "beta"))
    return total + made["v"].nbytes + 2 * made["state"].nbytes


@contextmanager
def configured(kernel: str | None, chosen: Mapping[str, int]) -> Iterator[None]:
    """Launches `kernel` with another configuration than the committed one."""
    committed = delta.configuration

    def choose(file: str, device: torch.device, name: str, size: int, plain: Mapping[str, int]) -> Mapping[str, int]:
        return chosen if name == kernel else committed(file, device, name, size, plain)

    with mock.patch.object(delta, "configuration", choose):
        yield


class Bench:
    """Rows of this run, and the copy rate their floors stand on."""

    def __init__(self) -> None:
        self.rate = copy_bytes_per_second()
        self.rows: list[Row] = []

    def add(self, row: Row) -> None:
        self.rows.append(row)
        time_text = "WRONG" if row.us is None else f"{row.us:9.1f} us  {row.share:5.1f} %"
        print(
            f"{row.operator:<20}{row.shape:<24}{row.configuration:<46}error {row.error:.2e} {row.state_error:.2e}  "
            f"floor {row.floor_us:7.1f}  {time_text}",
            flush=True,
        )

    def delta(
        self,
        operator: str,
        shape: str,
        lengths: Sequence[int],
        gates: str,
        kernel: str | None = None,
        chosen: Mapping[str, int] | None = None,
    ) -> None:
        """Checks one shape against float64 and itself, then times it."""
        bounds = [0, *itertools.accumulate(lengths)]
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device="cuda")
        made = delta_inputs(bounds[-1], len(lengths), gates)
        floor = _bytes(made) / self.rate * 1e6

        def call(inputs: Mapping[str, Any]) -> Tensor:
            if operator == "gated_delta_decode":
                return delta.gated_delta_decode(**inputs, scale=SCALE)
            return delta.gated_delta_prefill(**inputs, cu_seqlens=cu_seqlens, scale=SCALE)

        label = " ".join(f"{key}={value}" for key, value in (chosen or {}).items()) or "committed"
        with configured(kernel, chosen or {}):
            poison(POISON_BYTES)
            first, second = ({**made, "state": made["state"].clone()} for _ in range(2))
            out, again = call(first), call(second)
            want, want_state = recurrence(made, bounds)
            error, state_error = _relative(out, want), _relative(first["state"], want_state)
            same = torch.equal(out, again) and torch.equal(first["state"], second["state"])
            del first, second, again, want, want_state
            us = None
            if same and error <= MOST_OUTPUT_ERROR and state_error <= MOST_STATE_ERROR:
                count = sets_for(_bytes(made))
                sets = [made, *(delta_inputs(bounds[-1], len(lengths), gates) for _ in range(count - 1))]
                us = median_us([lambda inputs=inputs: call(inputs) for inputs in sets])  # type: ignore[misc]
        share = None if us is None else 100 * floor / us
        self.add(Row(operator, shape, label, error, state_error, us, floor, share))

    def convolution(self, operator: str, rows: int) -> None:
        """The short convolution over three streams of 64 x 128 channels."""
        make = lambda: torch.randn(rows, CHANNELS, device="cuda").bfloat16()  # noqa: E731
        weight = torch.randn(CHANNELS, TAPS, device="cuda").bfloat16()
        sequences = 1 if operator == "short_conv_prefill" else rows
        states = torch.randn(sequences, CHANNELS, TAPS - 1, device="cuda").bfloat16()
        slots = torch.arange(sequences, dtype=torch.int32, device="cuda")
        bounds = torch.tensor([0, rows], dtype=torch.int32, device="cuda")

        def call(x: Tensor, state: Tensor) -> Tensor:
            if operator == "short_conv_prefill":
                return convolution.short_conv_prefill(x, weight, state, slots, bounds)
            return convolution.short_conv_decode(x, weight, state, slots)

        x, state = make(), states.clone()
        poison(POISON_BYTES)
        out = call(x, state)
        wide = x.double().view(1, rows, CHANNELS) if sequences == 1 else x.double()[:, None]
        extended = torch.cat([states.double().transpose(1, 2), wide], 1)
        want = torch.nn.functional.silu(
            sum(
                extended[:, j : j + wide.shape[1]] * weight[:, j].double()
                for j in range(TAPS)  # type: ignore[arg-type]
            )
        )
        error = _relative(out, want.reshape(rows, CHANNELS))
        state_error = _relative(state, extended[:, -TAPS + 1 :].transpose(1, 2))
        nbytes = 2 * x.nbytes + weight.nbytes + 2 * states.nbytes
        del extended, want, wide
        us = None
        if error <= MOST_OUTPUT_ERROR and state_error == 0:
            count = sets_for(nbytes)
            sets = [(make(), states.clone()) for _ in range(count)]
            us = median_us([lambda pair=pair: call(*pair) for pair in sets])  # type: ignore[misc]
        floor = nbytes / self.rate * 1e6
        share = None if us is None else 100 * floor / us
        self.add(Row(operator, f"{rows} x {CHANNELS}", "committed", error, state_error, us, floor, share))

    def kernels(self, tokens: int) -> dict[str, float]:
        """Device time of each kernel of one prefill, in us, from the profiler."""
        made: dict[str, Any] = dict(delta_inputs(tokens, 1, "kda"))
        bounds = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            for _ in range(5):
                delta.gated_delta_prefill(**made, cu_seqlens=bounds, scale=SCALE)
            torch.cuda.synchronize()
        found = {event.key: event.device_time_total / event.count for event in profile.key_averages()}
        return {name: us for name, us in found.items() if name in ("chunk_terms", "state_pass")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="other launch configurations too")
    parser.add_argument("--seconds", type=float, default=100, help="after these no further configuration is begun")
    parser.add_argument("--json", help="file for the rows")
    options = parser.parse_args()
    began = time.monotonic()
    torch.manual_seed(0)
    bench = Bench()
    print(f"{torch.cuda.get_device_name()}, copy {bench.rate / 1e12:.2f} TB/s (read and written)", flush=True)
    decode, prefill = "gated_delta_decode", "gated_delta_prefill"
    for batch in (1, 32, 128):
        bench.delta(decode, f"batch {batch}, KDA", [1] * batch, "kda")
    bench.delta(decode, "batch 128, GDN", [1] * 128, "gdn")
    for lengths in ([4096], [8192], [1024] * 8, [1, 15, 16, 17, 130, 600, 3317]):
        shape = f"{len(lengths)} x {lengths[0]}" if len(set(lengths)) == 1 else f"{len(lengths)} uneven, {sum(lengths)}"
        bench.delta(prefill, f"{shape}, KDA", lengths, "kda")
    bench.delta(prefill, "1 x 4096, KDA bf16 gates", [4096], "kda bf16")
    bench.delta(prefill, "1 x 4096, GDN", [4096], "gdn")
    print(f"kernels of a prefill of 4,096 tokens, us: {bench.kernels(4096)}", flush=True)
    for operator, rows in (("short_conv_prefill", 4096), ("short_conv_decode", 32), ("short_conv_decode", 128)):
        bench.convolution(operator, rows)
    for kernel, candidates in SWEEPS.items() if options.sweep else ():
        for chosen in candidates:
            if time.monotonic() - began > options.seconds:
                print(f"not begun: {kernel} {chosen}", flush=True)
                continue
            try:
                if kernel == "decode_step":
                    bench.delta(decode, "batch 128, KDA", [1] * 128, "kda", kernel, chosen)
                else:
                    bench.delta(prefill, "1 x 4096, KDA", [4096], "kda", kernel, chosen)
            except Exception as error:  # a configuration the compiler refuses is a line of the table
                print(f"refused: {kernel} {chosen}: {type(error).__name__}: {error}", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"copy_bytes_a_second": bench.rate, "rows": [asdict(row) for row in bench.rows]}, file, indent=1)


if __name__ == "__main__":
    main()
