"""Cutting a sequence into calls changes nothing: chunk by chunk, prefill then decode, and token by token."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from day0_kernels import registry
from day0_kernels.comparison import same_bits
from day0_kernels.gated_delta.reference import gated_delta_decode, gated_delta_prefill
from day0_kernels.index_pool.reference import index_pool
from day0_kernels.index_select.reference import index_select_decode, index_select_prefill
from day0_kernels.inputs import make_inputs
from day0_kernels.short_conv.reference import short_conv_decode, short_conv_prefill
from day0_kernels.sparse_mla.reference import sparse_mla_decode, sparse_mla_prefill
from day0_kernels.spec import Case
from tests.kernels.naive import define

POOL, BLOCK, TOPK, CHUNK = 4, 16, 64, 64
LENGTHS_AROUND_TOPK = [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, TOPK - 1, TOPK, TOPK + 1]


def _ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _table(length: int) -> Tensor:
    """Blocks in an order that is not the order of positions."""
    return _ints(*reversed(range(-(-length // BLOCK))))[None]


def _cuts(length: int, *at: int) -> list[tuple[int, int]]:
    edges = [0, *(cut for cut in at if 0 < cut < length), length]
    return list(pairwise(edges))


# Indexer pooling: the cut falls on, before and behind every pool and block edge.


def _pooled(keys: Tensor, gates: Tensor, ape: Tensor, cuts: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    length, width = keys.shape
    table = _table(length)
    cache = torch.full((table.shape[1] * BLOCK // POOL, width), torch.nan)
    tail = torch.full((3, POOL, 2, width), torch.nan)
    for begin, end in cuts:
        index_pool(
            keys[begin:end],
            gates[begin:end],
            ape,
            tail,
            cache,
            _ints(2),
            table,
            _ints(0, end - begin),
            _ints(begin),
            BLOCK,
        )
    return cache, tail[2, : length % POOL]


@pytest.mark.parametrize("cut", [1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 33, 36])
def test_index_pool_cut_anywhere(cut: int) -> None:
    keys, gates, ape = _normal(0, 37, 8), _normal(1, 37, 8), _normal(2, POOL, 8)
    whole, cut_up = (_pooled(keys, gates, ape, cuts) for cuts in (_cuts(37), _cuts(37, cut)))
    assert all(same_bits(a, b) for a, b in zip(whole, cut_up, strict=True))


def test_index_pool_token_by_token() -> None:
    keys, gates, ape = _normal(0, 21, 8), _normal(1, 21, 8), _normal(2, POOL, 8)
    whole, single = (_pooled(keys, gates, ape, cuts) for cuts in (_cuts(21), _cuts(21, *range(1, 21))))
    assert all(same_bits(a, b) for a, b in zip(whole, single, strict=True))


# Short convolution.


@pytest.mark.parametrize("cuts", [(1,), (2,), (3,), (4,), (5,), (8, 9, 10), tuple(range(1, 12))])
def test_short_conv_cut_anywhere_and_decoded(cuts: tuple[int, ...]) -> None:
    x, weight = _normal(0, 12, 20), _normal(1, 20, 4)
    whole_state, state, decoded_state = (torch.zeros(2, 20, 3) for _ in range(3))
    whole = short_conv_prefill(x, weight, whole_state, _ints(1), _ints(0, 12))
    parts = [
        short_conv_prefill(x[begin:end], weight, state, _ints(1), _ints(0, end - begin))
        for begin, end in _cuts(12, *cuts)
    ]
    tokens = [short_conv_decode(x[t : t + 1], weight, decoded_state, _ints(1)) for t in range(12)]
    assert same_bits(torch.cat(parts), whole)
    assert same_bits(torch.cat(tokens), whole)
    assert same_bits(state, whole_state)
    assert same_bits(decoded_state, whole_state)


# Gated delta. Known faults elsewhere: a state that is wrong unless the length is a multiple of the chunk, and prefill
# and decode that drift apart.


def _delta_inputs(
    length: int, gate: float | str | None, heads: int = 2, key: int = 16, value: int = 8
) -> dict[str, Tensor]:
    drawn = -5 * torch.sigmoid(3 * _normal(3, length, heads, key))
    if gate == "late":
        # Most of the decay first: what follows is the difference of two large sums.
        gate, drawn = None, torch.where(torch.arange(length)[:, None, None] % CHUNK < CHUNK // 2, -20.0, drawn * 1e-3)
    return {
        "q": _normal(0, length, heads, key),
        "k": _normal(1, length, heads, key),
        "v": _normal(2, length, heads, value),
        "g": drawn if gate is None else torch.full_like(drawn, gate),
        "beta": torch.sigmoid(_normal(4, length, heads)),
    }


def _delta(tensors: dict[str, Tensor], cuts: list[tuple[int, int]], state: Tensor) -> Tensor:
    parts = [
        gated_delta_prefill(
            **{name: x[begin:end] for name, x in tensors.items()},
            state=state,
            state_slots=_ints(1),
            cu_seqlens=_ints(0, end - begin),
            scale=0.25,
            chunk_size=CHUNK,
        )
        for begin, end in cuts
    ]
    return torch.cat(parts)


def _recurrent(tensors: dict[str, Tensor], state: Tensor) -> Tensor:
    rows = [
        gated_delta_decode(
            **{name: x[t : t + 1] for name, x in tensors.items()}, state=state, state_slots=_ints(1), scale=0.25
        )
        for t in range(len(tensors["q"]))
    ]
    return torch.cat(rows)


def _exact(tensors: dict[str, Tensor], state: Tensor) -> tuple[Tensor, Tensor]:
    """Token by token in float64."""
    call: dict[str, Any] = {
        **tensors,
        "state": state,
        "state_slots": _ints(1),
        "cu_seqlens": _ints(0, len(tensors["q"])),
    }
    wanted = define("gated_delta_prefill", call, {"scale": 0.25, "l2norm_eps": 1e-6})
    return wanted["out"].float(), wanted["state"].float()


@pytest.mark.parametrize("gate", [None, 0.0, -1e-3, -0.3, -5.0, -30.0, -200.0, "late"], ids=str)
@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])
def test_gated_delta_equals_float64_token_by_token(length: int, gate: float | str | None) -> None:
    """Log decays from 0 to 200 a step: over a chunk their factor is far below the smallest float32."""
    tensors = _delta_inputs(length, gate)
    begun = torch.stack([torch.full((2, 16, 8), torch.nan), _normal(5, 2, 16, 8)])
    wanted, wanted_state = _exact(tensors, begun)
    chunked_state, recurrent_state = begun.clone(), begun.clone()
    chunked, recurrent = _delta(tensors, _cuts(length), chunked_state), _recurrent(tensors, recurrent_state)
    for got in (chunked, recurrent):
        torch.testing.assert_close(got, wanted, atol=3e-6, rtol=1e-5)
    for got in (chunked_state, recurrent_state):
        torch.testing.assert_close(got[1], wanted_state[1], atol=3e-6, rtol=1e-5)
        assert got[0].isnan().all()


@pytest.mark.parametrize("length", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])
def test_gated_delta_prefill_then_decode(length: int) -> None:
    tensors = _delta_inputs(length + 9, None)
    begun = torch.zeros(2, 2, 16, 8)
    wanted, wanted_state = _exact(tensors, begun)
    state = begun.clone()
    first = _delta(tensors, [(0, length)], state)
    rest = _recurrent({name: x[length:] for name, x in tensors.items()}, state)
    torch.testing.assert_close(torch.cat([first, rest]), wanted, atol=3e-6, rtol=1e-5)
    torch.testing.assert_close(state, wanted_state, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("cuts", [(1,), (16,), (63,), (65,), (100,), (16, 32, 48, 64, 80), (50, 114)])
def test_gated_delta_cut_anywhere(cuts: tuple[int, ...]) -> None:
    tensors = _delta_inputs(137, None)
    whole_state, state = torch.zeros(2, 2, 16, 8), torch.zeros(2, 2, 16, 8)
    whole, parts = _delta(tensors, _cuts(137), whole_state), _delta(tensors, _cuts(137, *cuts), state)
    torch.testing.assert_close(parts, whole, atol=3e-6, rtol=1e-5)
    torch.testing.assert_close(state, whole_state, atol=3e-6, rtol=1e-5)


def test_gated_delta_cut_at_chunk_edges_keeps_the_bits() -> None:
    tensors = _delta_inputs(3 * CHUNK + 7, None)
    whole_state, state = torch.zeros(2, 2, 16, 8), torch.zeros(2, 2, 16, 8)
    whole = _delta(tensors, _cuts(len(tensors["q"])), whole_state)
    assert same_bits(_delta(tensors, _cuts(len(tensors["q"]), CHUNK, 3 * CHUNK), state), whole)
    assert same_bits(state, whole_state)


def test_gated_delta_memory_grows_with_the_sub_chunk() -> None:
    """No tensor of chunk x chunk x K for every chunk: it would be 64 MiB here, four times what the largest may be."""
    tensors = _delta_inputs(16 * CHUNK, None, heads=4, key=64, value=8)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor):
                largest = max(largest, result.numel())
            return result

    with Watch():
        _delta(tensors, _cuts(16 * CHUNK), torch.zeros(2, 4, 64, 8))
    assert 0 < largest <= 16 * 4 * CHUNK * 16 * 64


# Index selection and sparse attention. Up to topk tokens the selection is everything and attention is dense.


def _selection(length: int, start: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    q, weights = _normal(seed, length - start, 32, 16), _normal(seed + 1, length - start, 32)
    table = _table(length)
    pools = torch.full((table.shape[1] * BLOCK // POOL, 16), torch.nan)
    for p in range(length // POOL):
        row = int(table[0, p * POOL // BLOCK]) * (BLOCK // POOL) + p * POOL % BLOCK // POOL
        pools[row] = _normal(100 + p, 16)
    scalars = {
        "pool_size": POOL,
        "topk_tokens": TOPK,
        "block_size": BLOCK,
        "softmax_scale": 0.25,
        "always_tail": True,
    }
    return q, weights, pools, scalars


@pytest.mark.parametrize("length", [*LENGTHS_AROUND_TOPK, 130, 300])
def test_index_select_decode_is_the_last_row_of_prefill(length: int) -> None:
    q, weights, pools, scalars = _selection(length, 0)
    table = _table(length)
    prefill = index_select_prefill(q, weights, pools, table, _ints(0, length), _ints(0), **scalars)
    tail = index_select_prefill(q[-1:], weights[-1:], pools, table, _ints(0, 1), _ints(length - 1), **scalars)
    decode = index_select_decode(q[-1:], weights[-1:], pools, table, _ints(length), **scalars)
    assert same_bits(decode, prefill[-1:])
    assert same_bits(tail, prefill[-1:])


@pytest.mark.parametrize("length", LENGTHS_AROUND_TOPK)
def test_up_to_topk_tokens_everything_is_selected(length: int) -> None:
    q, weights, pools, scalars = _selection(length, 0)
    chosen = index_select_prefill(q, weights, pools, _table(length), _ints(0, length), _ints(0), **scalars)
    for position in range(min(length, TOPK + POOL - 1)):
        assert chosen[position].tolist() == [*range(position + 1), *[-1] * (chosen.shape[1] - position - 1)]


def test_past_topk_tokens_selection_is_sparse_and_keeps_the_tail() -> None:
    q, weights, pools, scalars = _selection(131, 130)
    chosen = index_select_prefill(q, weights, pools, _table(131), _ints(0, 1), _ints(130), **scalars)[0].tolist()
    assert chosen[TOPK:] == [128, 129, 130]
    assert len(set(chosen)) == TOPK + 3
    assert chosen == sorted(chosen)
    assert chosen[:TOPK] != list(range(TOPK))


def test_equal_scores_take_the_lowest_positions() -> None:
    q, weights, pools, scalars = _selection(200, 199)
    pools = torch.where(pools.isnan(), pools, torch.ones(()))
    for tied in (weights, torch.zeros_like(weights), -weights.abs()):
        chosen = index_select_decode(q, tied, pools, _table(200), _ints(200), **scalars)
        assert chosen[0].tolist() == [*range(TOPK), *[-1] * 3]


def test_a_tie_at_the_border_goes_to_the_lower_pool() -> None:
    q, weights, pools, scalars = _selection(96, 95)
    scalars["topk_tokens"] = 8
    q, weights = torch.ones_like(q), torch.ones_like(weights)
    pools = torch.zeros_like(pools)
    table = _table(96)
    for pool, value in ((3, 1.0), (9, 2.0), (17, 1.0), (20, 0.5)):
        pools[int(table[0, pool * POOL // BLOCK]) * (BLOCK // POOL) + pool % (BLOCK // POOL)] = value
    chosen = index_select_decode(q, weights, pools, table, _ints(96), **scalars)
    assert chosen[0, :8].tolist() == [12, 13, 14, 15, 36, 37, 38, 39]


def test_a_nan_score_does_not_stop_the_others() -> None:
    q, weights, pools, scalars = _selection(200, 198)
    table = _table(200).expand(2, -1)
    alone = index_select_decode(q[1:], weights[1:], pools, table[:1], _ints(200), **scalars)
    q[0] = torch.nan
    both = index_select_decode(q, weights, pools, table, _ints(200, 200), **scalars)
    assert same_bits(both[1:], alone)
    assert both[0, :TOPK].tolist() == list(range(TOPK))


def _latents(length: int) -> Tensor:
    table = _table(length)
    cache = torch.full((table.shape[1] * BLOCK, 24), torch.nan)
    for position in range(length):
        cache[int(table[0, position // BLOCK]) * BLOCK + position % BLOCK] = _normal(500 + position, 24)
    return cache


@pytest.mark.parametrize("length", LENGTHS_AROUND_TOPK)
def test_up_to_topk_tokens_attention_is_dense_to_the_bit(length: int) -> None:
    """Selected positions give the bits of all positions, and both are dense attention."""
    q, weights, pools, scalars = _selection(length, 0)
    table, bounds = _table(length), _ints(0, length)
    chosen = index_select_prefill(q, weights, pools, table, bounds, _ints(0), **scalars)
    every = torch.arange(length, dtype=torch.int32).expand(length, -1)
    dense = every.masked_fill(every > torch.arange(length)[:, None], -1)
    wide = torch.nn.functional.pad(dense, (0, 200), value=-1)
    query, latents = _normal(9, length, 4, 24), _latents(length)
    options: dict[str, Any] = {"block_size": BLOCK, "softmax_scale": 0.3, "value_dim": 16}
    sparse = sparse_mla_prefill(query, latents, chosen, table, bounds, **options)
    for indices in (dense, wide):
        assert same_bits(sparse_mla_prefill(query, latents, indices, table, bounds, **options), sparse)
    rows = torch.stack([_normal(500 + position, 24) for position in range(length)]).double()
    logits = torch.einsum("thr,sr->ths", query.double(), rows) * 0.3
    logits = logits.masked_fill(torch.ones(length, length).triu(1).bool()[:, None], -torch.inf)
    torch.testing.assert_close(sparse, (logits.softmax(-1) @ rows[:, :16]).float(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("length", [*LENGTHS_AROUND_TOPK, 200])
def test_sparse_mla_decode_is_the_last_row_of_prefill(length: int) -> None:
    q, weights, pools, scalars = _selection(length, 0)
    table, bounds = _table(length), _ints(0, length)
    chosen = index_select_prefill(q, weights, pools, table, bounds, _ints(0), **scalars)
    query, latents = _normal(9, length, 4, 24), _latents(length)
    options: dict[str, Any] = {"block_size": BLOCK, "softmax_scale": 0.3, "value_dim": 24}
    prefill = sparse_mla_prefill(query, latents, chosen, table, bounds, **options)
    assert same_bits(sparse_mla_decode(query[-1:], latents, chosen[-1:], table, **options), prefill[-1:])


# Experts: all tokens on one, none on another, none at all, against the dense loop.


@pytest.mark.parametrize("rows", [(0, 0, 9, 0), (40, 0, 0, 0), (0, 0, 0, 0), (1, 0, 17, 16), (5,)])
def test_expert_gemm_equals_the_dense_loop(rows: tuple[int, ...]) -> None:
    operator = registry.operator("expert_gemm")
    inputs = make_inputs(operator, Case("hand", {"Din": 32, "Dout": 8}, expert_rows=rows))
    out = registry.resolve("expert_gemm", "cpu", torch.float32).fn(**inputs.tensors)
    x, weight = inputs.tensors["x"], inputs.tensors["weight"]
    owner = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(rows))
    wanted = torch.zeros(len(x), 8)
    for expert in range(len(rows)):
        wanted += (x @ weight[expert].T) * (owner == expert)[:, None]
    torch.testing.assert_close(out, wanted, atol=2e-6, rtol=1e-5)
