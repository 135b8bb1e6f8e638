"""DeepGEMM's index scores (prefill, paged decode) and grouped FP8 products (contiguous, masked)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from day0.bench.ops.peers.index_scores import BLOCK, KEY_BYTES, DecodeInputs, PrefillInputs, Size, definition
from day0.bench.ops.peers.peer import Peer, installed, load, random_fp8, relative_error
from day0.bench.ops.peers.routing import EXPERTS, Product, Routing
from day0.bench.ops.shape import Call, Shape

MODULE = "deep_gemm"
LIMIT, GROUP = 0.02, 128
# Rows of one expert are padded to this many in the masked layout; more tokens than this are for the contiguous one.
MOST_MASKED_ROWS = 1024
PRODUCTS = ("fp8_expert_product", "fp8_expert_gemm")


def prefill_scores(made: PrefillInputs) -> Callable[[], Tensor]:
    """Float32 scores `[4096, keys]`; what a query does not see is left unwritten."""
    score = load(MODULE).fp8_mqa_logits
    return lambda: score(made.q, (made.keys, made.scales), made.weights, made.start, made.end, False)


def decode_scores(made: DecodeInputs, q: Tensor, weights: Tensor, table: Tensor) -> Callable[[], Tensor]:
    """Float32 scores `[batch, keys]`, the schedule made before."""
    deep_gemm = load(MODULE)
    cores = torch.cuda.get_device_properties(0).multi_processor_count
    cache = made.cache.view(-1, BLOCK, 1, KEY_BYTES)
    # Versions differ in whether lengths are a column.
    for lengths in (made.lengths[:, None], made.lengths):
        try:
            plan = deep_gemm.get_paged_mqa_logits_metadata(lengths, BLOCK, cores)
            call = partial(
                deep_gemm.fp8_paged_mqa_logits, q, cache, weights, lengths, table, plan, made.size.keys, False
            )
            call()
        except RuntimeError as error:
            refused = error
            continue
        return call
    raise refused


def index_prefill(size: Size, operator: str, name: str) -> Shape:
    """Scores alone."""
    made = PrefillInputs(size)
    some = [0, 1, made.tokens // 2 + 7, made.tokens - 1]
    wanted = definition(made.q[some], made.keys, made.scales, made.weights[some])
    ends = made.end[some].tolist()

    def error(out: Tensor) -> float:
        return max(
            relative_error(out[row, :end], want[:end]) for row, end, want in zip(some, ends, wanted, strict=True)
        )

    return Shape(operator, name, [prefill_scores(made)], made.size_bytes, error, LIMIT, made.flops, "fp8")


def index_decode(size: Size, operator: str, name: str) -> Shape:
    """Scores alone."""
    made = DecodeInputs(size)
    wanted = {row: made.wanted(row) for row in {0, size.batch - 1}}

    def error(out: Tensor) -> float:
        return max(relative_error(out[row, : size.keys], want) for row, want in wanted.items())

    calls = [decode_scores(made, *one) for one in made.sets]
    return Shape(operator, name, calls, made.size_bytes, error, LIMIT, made.flops, "fp8")


class Experts:
    """FP8 rows with a scale for 128 columns, FP8 weights with one for 128 x 128, and their routing."""

    def __init__(self, product: Product) -> None:
        self.product, self.routing = product, Routing(product.tokens)
        n, k = product.outputs, product.depth
        self.weight, self.x = random_fp8(EXPERTS, n, k), random_fp8(self.routing.rows, k)
        self.weight_scales = torch.rand(EXPERTS, n // GROUP, k // GROUP, device="cuda") * 0.02 + 0.01
        self.x_scales = torch.rand(self.routing.rows, k // GROUP, device="cuda") + 0.5

    def _row(self, i: int) -> Tensor:
        return self.x[i].float() * self.x_scales[i].repeat_interleave(GROUP)

    def _weight(self, expert: int) -> Tensor:
        scales = self.weight_scales[expert].repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
        return self.weight[expert].float() * scales

    def shape(self, name: str, call: Call, rows_of: Callable[[Tensor], Tensor]) -> Shape:
        error = self.routing.error(self._row, self._weight)
        size_bytes = self.routing.size_bytes(self.product, 1 + 4 / GROUP**2)
        flops = self.routing.flops(self.product)
        return Shape("fp8_expert_gemm", name, [call], size_bytes, lambda out: error(rows_of(out)), LIMIT, flops, "fp8")


def contiguous(product: Product, name: str) -> Shape:
    """Rows of each expert padded to the kernel's tile, which counts as its own time."""
    deep_gemm, made = load(MODULE), Experts(product)
    tile, routing = deep_gemm.get_mk_alignment_for_contiguous_layout(), made.routing
    padded = (routing.counts + tile - 1) // tile * tile
    first = torch.cat((padded.new_zeros(1), padded.cumsum(0)))
    total, place = int(first[-1]), first[routing.owners] + routing.places
    owners = torch.full((total,), -1, dtype=torch.int32, device="cuda")
    owners[place] = routing.owners.int()
    x = torch.zeros(total, product.depth, dtype=torch.uint8, device="cuda")
    x[place] = made.x.view(torch.uint8)
    scales = torch.ones(total, product.depth // GROUP, device="cuda")
    scales[place] = made.x_scales
    left = (x.view(torch.float8_e4m3fn), deep_gemm.get_mn_major_tma_aligned_tensor(scales))
    out = torch.full((total, product.outputs), torch.nan, dtype=torch.bfloat16, device="cuda")

    def call() -> Tensor:
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(left, (made.weight, made.weight_scales), out, owners)
        return out

    return made.shape(name, call, lambda found: found[place])


def masked(product: Product, name: str) -> Shape:
    """Every expert has room for the rows of the fullest one."""
    deep_gemm, made = load(MODULE), Experts(product)
    routing = made.routing
    room = -(-int(routing.counts.max()) // GROUP) * GROUP
    at = (routing.owners, routing.places)
    x = torch.zeros(EXPERTS, room, product.depth, dtype=torch.uint8, device="cuda")
    x[at] = made.x.view(torch.uint8)
    scales = torch.ones(EXPERTS, room, product.depth // GROUP, device="cuda")
    scales[at] = made.x_scales
    left = (x.view(torch.float8_e4m3fn), deep_gemm.get_mn_major_tma_aligned_tensor(scales))
    out = torch.full((EXPERTS, room, product.outputs), torch.nan, dtype=torch.bfloat16, device="cuda")
    counts, mean = routing.counts.int(), -(-routing.rows // EXPERTS)

    def call() -> Tensor:
        deep_gemm.m_grouped_fp8_gemm_nt_masked(left, (made.weight, made.weight_scales), out, counts, mean)
        return out

    return made.shape(name, call, lambda found: found[at])


def peers(operator: str, shape: str) -> Iterator[Peer]:
    """Of index selection on FP8 keys, whose scores alone it computes, and of FP8 expert products."""
    if not installed(MODULE):
        return
    if operator.startswith("fp8_index_select") and (size := Size.of(shape)) is not None:
        name = "fp8_paged_mqa_logits" if size.batch else "fp8_mqa_logits"
        make = partial(index_decode if size.batch else index_prefill, size, operator, shape)
        yield Peer(MODULE, name, make, "scores alone")
    if operator in PRODUCTS and (product := Product.of(shape)) is not None:
        yield Peer(MODULE, "m_grouped contiguous", partial(contiguous, product, shape), "FP8 rows, padded before")
        if product.tokens * 8 <= MOST_MASKED_ROWS:
            yield Peer(MODULE, "m_grouped masked", partial(masked, product, shape), "FP8 rows, laid out before")
