"""Checks and times index selection and sparse latent attention on one NVIDIA GPU; it reads no model.

    PYTHONPATH=.:kernels python -m benchmarks.sparse [--seconds 100] [--only decode] [--json out.json]

Each line is printed when it is done. A shape is checked first, in poisoned memory and twice: attention against float32
of some rows, selection against the reference's positions; a wrong one has no time. Times are medians of CUDA graph
replays over input sets that do not stay in L2; floor = bytes / copy rate, the copy measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_timing import copy_bytes_per_second, median_us, poison, sets_for
from day0_kernels.index_select import reference as index_reference
from day0_kernels.index_select.triton import index_select_decode
from day0_kernels.sparse_mla import reference as mla_reference
from day0_kernels.sparse_mla.triton import sparse_mla_decode, sparse_mla_prefill

BLOCK, TOPK, CONTEXT, LATENT = 64, 2048, 65536, 512
# Relative error of a bfloat16 result whose weights are rounded to bfloat16 too.
MOST_ERROR = 4e-3
# Share of positions that may differ from the reference's: another order of summation moves scores a bit apart.
MOST_OTHER_POSITIONS = 2e-3
POISON_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Row:
    """One line: relative error (of positions: share that differs), median and floor; `us` is None where it is wrong."""

    operator: str
    shape: str
    error: float
    us: float | None
    floor_us: float


@dataclass(frozen=True, slots=True)
class Shape:
    """A thing to time: input sets in turn, bytes that must move, the error of one result and its limit."""

    operator: str
    name: str
    calls: list[Callable[[], Tensor]]
    size_bytes: float
    error: Callable[[Tensor], float]
    limit: float


def _bind(fn: Callable[..., Tensor], tensors: dict[str, Tensor], scalars: dict[str, Any]) -> Callable[[], Tensor]:
    return lambda: fn(**tensors, **scalars)


def _tables(sequences: int, context: int) -> tuple[Tensor, int]:
    blocks = context // BLOCK
    # More slots than this share blocks between sequences: reads stay scattered and memory bounded.
    count = min(sequences * blocks, 1 << 15)
    ids = torch.cat([torch.randperm(count, device="cuda") for _ in range(-(-sequences * blocks // count))])
    return ids[: sequences * blocks].view(sequences, blocks).int(), count


def attention(operator: str, heads: int, width: int, rows: int) -> Shape:
    """`rows` sequences of 64k tokens, or as many tokens of one."""
    packed = operator == "sparse_mla_prefill"
    table, blocks = _tables(1 if packed else rows, CONTEXT)
    latents = torch.randn(blocks * BLOCK, width, device="cuda").bfloat16()
    read = min(rows * TOPK, CONTEXT if packed else rows * TOPK)
    moved = read * width * 2 + rows * (heads * (width + LATENT) * 2 + TOPK * 4)
    scalars = {"block_size": BLOCK, "softmax_scale": 192**-0.5, "value_dim": LATENT}
    calls: list[Callable[[], Tensor]] = []
    first: dict[str, Tensor] = {}
    for _ in range(sets_for(moved)):
        made = {
            "q": torch.randn(rows, heads, width, device="cuda").bfloat16(),
            "latents": latents,
            "topk_indices": torch.randint(0, CONTEXT, (rows, TOPK), device="cuda").sort(1).values.int(),
            "block_table": table,
        }
        if packed:
            made["cu_seqlens"] = torch.tensor([0, rows], dtype=torch.int32, device="cuda")
        first = first or made
        calls.append(_bind(sparse_mla_prefill if packed else sparse_mla_decode, made, scalars))

    def error(out: Tensor) -> float:
        some = sorted({0, rows // 2, rows - 1})
        call: dict[str, Any] = {"q": first["q"][some].float(), "latents": latents}
        call["topk_indices"] = first["topk_indices"][some]
        call["block_table"] = table.expand(rows, -1)[some] if packed else table[some]
        wanted = mla_reference.sparse_mla_decode(**call, **scalars).double()
        off = float((out[some].double() - wanted).norm() / wanted.norm())
        return off if bool(out.isfinite().all()) else float("inf")

    return Shape(operator, f"{rows} x {heads} heads, {width}", calls, moved, error, MOST_ERROR)


def selection(rows: int, heads: int, context: int, pool: int) -> Shape:
    """`rows` sequences of `context` tokens, each less than the one before by a token."""
    table, blocks = _tables(rows, context)
    keys = torch.randn(blocks * BLOCK // pool, 128, device="cuda").bfloat16()
    columns = TOPK + (pool - 1 if pool > 1 else 0)
    moved = rows * (context // pool * 128 * 2 + heads * 130 * 2 + columns * 4)
    lengths = (context - torch.arange(rows, device="cuda")).int()
    scalars = {
        "pool_size": pool, "topk_tokens": TOPK, "block_size": BLOCK, "softmax_scale": 128**-0.5, "always_tail": pool > 1
    }  # fmt: skip
    sets = [
        {
            "q": torch.randn(rows, heads, 128, device="cuda").bfloat16(),
            "weights": torch.rand(rows, heads, device="cuda").bfloat16(),
            "pool_cache": keys,
            "block_table": table,
            "seq_lens": lengths,
        }
        for _ in range(sets_for(moved))
    ]

    def error(out: Tensor) -> float:
        some = sorted({0, rows - 1})
        call: dict[str, Any] = {name: x if name == "pool_cache" else x[some] for name, x in sets[0].items()}
        wanted = index_reference.index_select_decode(**call, **scalars)
        other = [set(a) ^ set(b) for a, b in zip(out[some].tolist(), wanted.tolist(), strict=True)]
        return sum(map(len, other)) / (2 * wanted.numel())

    calls = [_bind(index_select_decode, made, scalars) for made in sets]
    name = f"{rows} x {heads} heads, {context // 1024}k, pool {pool}"
    return Shape("index_select_decode", name, calls, moved, error, MOST_OTHER_POSITIONS)


def shapes() -> Iterator[Callable[[], Shape]]:
    """GLM-5.3-Flash (64 heads of 512, pools of 16) and DeepSeek-V3.2 (128 of 576), the shortest first."""
    for rows in (1, 32, 128):
        yield lambda rows=rows: attention("sparse_mla_decode", 64, 512, rows)  # type: ignore[misc]
        yield lambda rows=rows: selection(rows, 32, 131072, 16)  # type: ignore[misc]
        yield lambda rows=rows: selection(rows, 32, 131072, 1)  # type: ignore[misc]
    for heads in (16, 32, 128):
        yield lambda heads=heads: attention("sparse_mla_decode", heads, 576, 128)  # type: ignore[misc]
    yield lambda: attention("sparse_mla_prefill", 64, 512, 4096)
    yield lambda: attention("sparse_mla_prefill", 128, 576, 4096)


def measured(shape: Shape, rate: float) -> Row:
    poison(POISON_BYTES)
    out, again = shape.calls[0](), shape.calls[0]()
    error = shape.error(out) if torch.equal(out, again) else float("inf")
    us = median_us(shape.calls) if error <= shape.limit else None
    return Row(shape.operator, shape.name, error, us, shape.size_bytes / rate * 1e6)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=100, help="after these no further shape is begun")
    parser.add_argument("--only", default="", help="only operators whose name has this in it")
    parser.add_argument("--json", type=Path, help="file for the rows")
    options = parser.parse_args()
    began, rows = time.monotonic(), []
    torch.manual_seed(0)
    rate = copy_bytes_per_second()
    print(f"{torch.cuda.get_device_name()}, copy {rate / 1e12:.2f} TB/s (read and written)", flush=True)
    for make in shapes():
        if time.monotonic() - began > options.seconds:
            print("not begun: the shapes after these", flush=True)
            break
        with torch.no_grad():
            shape = make()
            if options.only not in shape.operator:
                continue
            row = measured(shape, rate)
        rows.append(row)
        said = "WRONG" if row.us is None else f"{row.us:9.1f} us {100 * row.floor_us / row.us:6.1f} %"
        print(f"{row.operator:<22}{row.shape:<34}error {row.error:.1e}  floor {row.floor_us:8.1f}  {said}", flush=True)
        del shape
        torch.cuda.empty_cache()
    if options.json:
        found = {"copy_bytes_a_second": rate, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return int(any(row.us is None for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
