"""Checks the Triton operators on this GPU, then times them beside their byte floors; needs one NVIDIA GPU.

Run it from the repository with `PYTHONPATH=.:kernels python -m benchmarks.operators`. Times are medians of graph
replays over inputs that do not stay in L2; a floor is the bytes that must move, at the rate of a copy in the same run.
No time is printed for an operator whose check failed. `--sweep` times other tile sizes than the committed ones too.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.gpu_timing import copy_bytes_per_second, median_us, poison, sets_for
from benchmarks.operator_checks import check_all
from day0_kernels import registry
from day0_kernels.mxfp4 import decode
from day0_kernels.triton_launch import configuration

TOP_K = 8
STREAMS, HIDDEN, EXPERTS, WIDTH = 4, 4096, 288, 2048
HC = {"norm_eps": 1e-5, "hc_eps": 1e-6, "sinkhorn_iters": 20}
SEED = 0
# Of the seconds of a run, what the checks may take.
CHECKS_SHARE = 0.5


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: calls on input sets in turn, bytes that must move, relative error and its limit."""

    operator: str
    shape: str
    calls: list[Callable[[], Any]]
    size_bytes: float
    error: Callable[[], float]
    limit: float


def _ours(name: str) -> Callable[..., Any]:
    return registry.resolve(name, "cuda", torch.bfloat16, "triton").fn


def _reference(name: str) -> Callable[..., Any]:
    return registry.resolve(name, "cuda", torch.bfloat16, "reference").fn


def _normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def _error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||; infinite where got is not finite."""
    if not bool(got.float().isfinite().all()):
        return float("inf")
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-30))


def _bind(fn: Callable[..., Any], *arguments: Any, **scalars: Any) -> Callable[[], Any]:
    return lambda: fn(*arguments, **scalars)


def hyper_connection() -> Iterator[Row]:
    fn = _normal((2 + STREAMS) * STREAMS, STREAMS * HIDDEN, dtype=torch.float32) * (STREAMS * HIDDEN) ** -0.5
    base, scale = _normal((2 + STREAMS) * STREAMS, dtype=torch.float32), torch.ones(3, device="cuda")
    pre, post = _ours("hc_pre"), _ours("hc_post")
    for tokens in (1, 128, 4096):
        moved = tokens * HIDDEN * 2 * (STREAMS + 1) + fn.numel() * 4
        streams = [_normal(tokens, STREAMS, HIDDEN) for _ in range(sets_for(moved))]
        calls = [_bind(pre, x, fn, base, scale, **HC) for x in streams]
        rows = sorted({0, tokens // 2, tokens - 1})

        def pre_error(calls: list[Any] = calls, streams: list[Tensor] = streams, rows: list[int] = rows) -> float:
            wanted = _reference("hc_pre")(streams[0][rows].float(), fn, base, scale, **HC)
            return max(_error(got[rows], want) for got, want in zip(calls[0](), wanted, strict=True))

        yield Row("hc_pre", f"{tokens} tokens", calls, moved, pre_error, 4e-3)
        added, weights = _normal(tokens, HIDDEN), torch.rand(tokens, STREAMS, device="cuda")
        comb = torch.rand(tokens, STREAMS, STREAMS, device="cuda")
        moved = tokens * HIDDEN * 2 * (2 * STREAMS + 1)
        calls = [_bind(post, x, added, weights, comb) for x in streams]

        def post_error(
            calls: list[Any] = calls,
            arguments: tuple[Tensor, ...] = (streams[0], added, weights, comb),
            rows: list[int] = rows,
        ) -> float:
            return _error(calls[0]()[rows], _reference("hc_post")(*(x[rows].float() for x in arguments)))

        yield Row("hc_post", f"{tokens} tokens", calls, moved, post_error, 4e-3)


def kv_store() -> Iterator[Row]:
    width, store = 576, _ours("kv_store")
    for tokens in (32, 4096):
        moved = tokens * width * 4
        cache = torch.zeros(1 << 18, width, dtype=torch.bfloat16, device="cuda")
        slots = torch.randperm(len(cache), device="cuda")[:tokens].int()
        rows = [_normal(tokens, width) for _ in range(sets_for(moved))]

        def error(rows: Tensor = rows[0], cache: Tensor = cache, slots: Tensor = slots) -> float:
            store(rows, cache, slots)
            return _error(cache[slots.long()], rows)

        yield Row("kv_store", f"{tokens} x {width}", [_bind(store, x, cache, slots) for x in rows], moved, error, 0.0)


def _packed(experts: int, outputs: int, depth: int) -> tuple[Tensor, Tensor]:
    codes = torch.randint(0, 256, (experts, outputs, depth // 2), dtype=torch.uint8, device="cuda")
    return codes, torch.randint(118, 124, (experts, outputs, depth // 32), dtype=torch.uint8, device="cuda")


def conversion() -> Iterator[Row]:
    convert = _ours("mxfp4_to_fp8")
    for experts in (32, EXPERTS):
        codes, scales = _packed(experts, 2 * WIDTH, HIDDEN)
        fp8 = torch.empty(experts, 2 * WIDTH, HIDDEN, dtype=torch.uint8, device="cuda")

        def error(codes: Tensor = codes, scales: Tensor = scales, fp8: Tensor = fp8) -> float:
            block_scales, spans = convert(codes, scales, fp8)
            assert int(spans.max()) <= 14
            wide = block_scales[-1].repeat_interleave(128, 0).repeat_interleave(128, 1)
            return _error(fp8[-1].view(torch.float8_e4m3fn).float() * wide, decode(codes[-1], scales[-1]))

        moved = fp8.numel() * (17 / 32 + 1)
        yield Row("mxfp4_to_fp8", f"{experts} x 4096 x 4096", [_bind(convert, codes, scales, fp8)], moved, error, 0.0)


def experts() -> Iterator[Row]:
    product = _ours("mxfp4_expert_gemm")
    for name, outputs, depth in (("up", 2 * WIDTH, HIDDEN), ("down", HIDDEN, WIDTH)):
        codes, scales = _packed(EXPERTS, outputs, depth)
        for tokens in (1, 32, 128, 512, 1024, 4096):
            calls, active, probes = [], 0, []
            for _ in range(3):
                ids = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP_K, 1).indices.flatten()
                counts = torch.bincount(ids, minlength=EXPERTS)
                offsets = torch.cat((counts.new_zeros(1), counts.cumsum(0))).int()
                x = _normal(tokens * TOP_K, depth)
                calls.append(_bind(product, x, codes, scales, offsets))
                active += int((counts > 0).sum())
                probes.append((x, ids.sort().values))
            active = round(active / 3)
            moved = active * outputs * depth * 17 / 32 + tokens * TOP_K * (depth + outputs) * 2

            def error(
                calls: list[Any] = calls,
                probe: tuple[Tensor, Tensor] = probes[0],
                packed: tuple[Tensor, Tensor] = (codes, scales),
            ) -> float:
                x, owners = probe
                got, worst = calls[0](), 0.0
                for row in sorted({0, len(x) // 2, len(x) - 1}):
                    owner = int(owners[row])
                    worst = max(worst, _error(got[row], decode(packed[0][owner], packed[1][owner]) @ x[row].float()))
                return worst

            yield Row("mxfp4_expert_gemm", f"{name} {tokens} tok {active} exp", calls, moved, error, 4e-3)


FAMILIES: Mapping[str, Callable[[], Iterator[Row]]] = {
    "hyper_connection": hyper_connection,
    "kv_store": kv_store,
    "mxfp4_to_fp8": conversion,
    "mxfp4_expert_gemm": experts,
}
# Of an operator: the kernel whose configuration is varied, and what to try beside the committed one.
SWEEPS: Mapping[str, tuple[str, tuple[Mapping[str, int], ...]]] = {
    "mxfp4_expert_gemm": (
        "product",
        tuple(
            {"BLOCK_M": m, "BLOCK_N": n, "STAGES": stages, "UNROLL": unroll, "num_warps": warps}
            for m, n, stages, unroll, warps in (
                (64, 16, 4, 1, 4), (64, 16, 3, 2, 4), (128, 16, 3, 1, 4), (128, 16, 6, 1, 4), (128, 16, 3, 2, 4),
                (256, 16, 4, 1, 8), (256, 16, 3, 2, 8), (128, 32, 3, 2, 4), (64, 64, 3, 1, 4), (128, 64, 4, 1, 8),
            )
        ),
    ),
    "mxfp4_to_fp8": ("convert", ({"num_warps": 1}, {"num_warps": 2}, {"num_warps": 8})),
    "hc_pre": (
        "mix",
        tuple(
            {"BLOCK_T": t, "BLOCK_K": 64, "DEPTH": depth, "num_warps": warps, "num_stages": 4}
            for t, depth, warps in ((64, 512, 4), (128, 1024, 8), (64, 1024, 4))
        ),
    ),
    "hc_post": ("mixed", ({"BLOCK_D": 2048, "num_warps": 8}, {"BLOCK_D": 512, "num_warps": 2})),
}  # fmt: skip


def swept(row: Row) -> Iterator[tuple[Mapping[str, int], float]]:
    """Other configurations of the row's kernel and their medians; one that is wrong has none."""
    kernel, choices = SWEEPS.get(row.operator, ("", ()))
    launcher = registry.resolve(row.operator, "cuda", torch.bfloat16, "triton").fn.__module__
    for choice in choices:

        def chosen(file: str, device: torch.device, asked: str, size: int, plain: Mapping[str, int]) -> Any:
            return choice if asked == kernel else configuration(file, device, asked, size, plain)  # noqa: B023

        with mock.patch(f"{launcher}.configuration", chosen):
            yield choice, median_us(row.calls) if row.error() <= row.limit else float("nan")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="operators, by commas; all by default")
    parser.add_argument("--sweep", action="store_true", help="time other tile sizes too")
    parser.add_argument("--json", type=Path, help="write the rows there as well")
    parser.add_argument("--seconds", type=float, default=110, help="of the whole run; half of them for the checks")
    parser.add_argument("--seconds-each", type=float, default=40, help="after these a check begins no further case")
    arguments = parser.parse_args()
    began = time.monotonic()
    only = set(filter(None, arguments.only.split(",")))
    torch.manual_seed(SEED)
    with torch.no_grad():
        wrong = check_all(only, arguments.seconds * CHECKS_SHARE, arguments.seconds_each)
        rate = copy_bytes_per_second()
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {rate / 1e12:.2f} TB/s", flush=True)
        print(f"{'operator':<20}{'shape':<24}{'us':>9}{'floor':>9}{'%':>7}{'error':>10}", flush=True)
        found: list[dict[str, Any]] = []
        for family in FAMILIES.values():
            torch.cuda.empty_cache()
            poison(1 << 30)
            for row in family():
                if time.monotonic() - began > arguments.seconds:
                    print(f"not begun: {row.operator} {row.shape}", flush=True)
                    continue
                if (only and row.operator not in only) or wrong.get(row.operator) or wrong["rounding"]:
                    continue
                error, floor_us = row.error(), row.size_bytes / rate * 1e6
                if error > row.limit:
                    print(
                        f"{row.operator:<20}{row.shape:<24}WRONG: error {error:.1e}, limit {row.limit:.1e}", flush=True
                    )
                    wrong[row.operator].append(row.shape)
                    continue
                time_us = median_us(row.calls)
                share = 100 * floor_us / time_us
                print(
                    f"{row.operator:<20}{row.shape:<24}{time_us:>9.1f}{floor_us:>9.1f}{share:>7.1f}{error:>10.1e}",
                    flush=True,
                )
                found.append(
                    {"operator": row.operator, "shape": row.shape, "us": time_us, "floor_us": floor_us, "error": error}
                )
                for choice, other_us in swept(row) if arguments.sweep else ():
                    print(f"    {json.dumps(choice):<70}{other_us:>9.1f}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"copy_bytes_per_second": rate, "rows": found}, indent=1) + "\n")
    return int(any(wrong.values()))


if __name__ == "__main__":
    sys.exit(main())
