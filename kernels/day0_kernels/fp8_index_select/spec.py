"""What index selection on FP8 queries and keys computes, for prefill and decode, as data."""

from typing import Any

from day0_kernels.spec import EXACT, Case, Fill, Operator, TensorSpec

_DIMS = {"HI": 32, "D": 16, "P": 4, "num_blocks": 24, "block_size": 16}


def _case(
    name: str,
    *new_tokens: int,
    starts: tuple[int, ...] = (),
    topk: int = 64,
    tail: bool = True,
    pool: int = 4,
    **dims: int,
) -> Case:
    sizes = _DIMS | {"P": pool} | dims
    scalars = {"pool_size": pool, "topk_tokens": topk, "block_size": sizes["block_size"], "always_tail": tail}
    sizes |= {"W": topk + (pool - 1 if tail else 0)}
    return Case(name, sizes, new_tokens, starts or (0,) * len(new_tokens), scalars)


def _decode(name: str, *lengths: int, **options: Any) -> Case:
    return _case(name, *(1 for _ in lengths), starts=tuple(length - 1 for length in lengths), **options)


_SCALARS = {
    "pool_size": "tokens per pool P",
    "topk_tokens": "tokens to choose; topk_tokens // P pools",
    "block_size": "tokens per block, a multiple of P",
    "always_tail": "whether the incomplete last pool is always chosen",
}
_FORMULA = (
    "score(p) = key_scale[p] * sum_h weights[h] * relu(q[h] . key[p]); the topk_tokens // P best pools whose "
    "last position is visible, ties to the lowest, as ascending positions, then the tail, then -1"
)
_KEY_CACHE = TensorSpec(
    "key_cache",
    ("num_blocks", "block_size // P * (D + 4)"),
    "uint8",
    fill=Fill.FP8_INDEX_KEYS,
    ids="of a block first block_size / P keys of D e4m3fn bits, then as many float32 scales",
)
_BLOCK_TABLE = TensorSpec(
    "block_table", ("B", "max_blocks"), "int32", fill=Fill.BLOCK_TABLE, ids="0 .. num_blocks - 1, -1 pads"
)


def _queries(count: str) -> tuple[TensorSpec, TensorSpec]:
    bits = TensorSpec("q", (count, "HI", "D"), "uint8", fill=Fill.FP8_BITS, ids="e4m3fn bits, no NaN")
    return bits, TensorSpec("weights", (count, "HI"), "float32")


OPERATORS = (
    Operator(
        name="fp8_index_select_prefill",
        formula=_FORMULA,
        tensors=(
            *_queries("T"),
            _KEY_CACHE,
            _BLOCK_TABLE,
            TensorSpec("cu_seqlens", ("B + 1",), "int32", fill=Fill.CU_SEQLENS),
            TensorSpec("start_positions", ("B",), "int32", fill=Fill.START_POSITIONS),
        ),
        outputs=(TensorSpec("topk_indices", ("T", "W"), "int32", ids="positions 0 .. length - 1, -1 pads"),),
        scalars=_SCALARS,
        cases=(
            _case("one", 1),
            _case("two", 2),
            _case("pool_minus_1", 3),
            _case("pool", 4),
            _case("pool_plus_1", 5),
            _case("block_minus_1", 15),
            _case("block", 16),
            _case("block_plus_1", 17),
            _case("topk_minus_1", 63),
            _case("topk", 64),
            _case("topk_plus_1", 65),
            _case("sparse", 150),
            _case("continued", 20, starts=(130,)),
            _case("packed", 70, 1, 3, 90, starts=(0, 63, 64, 5)),
            _case("empty_sequence", 2, 0, 5, starts=(70, 9, 0)),
            _case("no_token", 0),
            _case("without_tail", 90, tail=False),
            _case("pool_of_1", 40, pool=1, topk=16),
            _case("topk_not_of_pools", 60, topk=18),
            _case("one_head", 100, HI=1),
            _case("topk_above_context", 40, topk=4096),
            _case("beyond_a_tile", 30, starts=(330,)),
        ),
        tolerance=EXACT,
    ),
    Operator(
        name="fp8_index_select_decode",
        formula=_FORMULA,
        tensors=(
            *_queries("B"),
            _KEY_CACHE,
            _BLOCK_TABLE,
            TensorSpec("seq_lens", ("B",), "int32", fill=Fill.SEQ_LENS, ids="1 .. context, 0 pads"),
        ),
        outputs=(TensorSpec("topk_indices", ("B", "W"), "int32", ids="positions 0 .. length - 1, -1 pads"),),
        scalars=_SCALARS,
        cases=(
            _decode("one", 1),
            _decode("two", 2),
            _decode("pool_edges", 3, 4, 5),
            _decode("block_edges", 15, 16, 17),
            _decode("topk_minus_1", 63),
            _decode("topk", 64),
            _decode("topk_plus_1", 65),
            _decode("sparse", 300),
            _decode("batch", 1, 70, 64, 129, 4, 33),
            _decode("padding_rows", 0, 80, 0),
            _decode("only_padding", 0),
            _decode("without_tail", 90, 3, tail=False),
            _decode("pool_of_1", 40, pool=1, topk=16),
            _decode("topk_above_context", 40, topk=4096),
            _decode("one_head", 100, HI=1),
        ),
        tolerance=EXACT,
    ),
)
