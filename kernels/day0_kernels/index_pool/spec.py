"""What indexer key pooling computes, as data."""

from day0_kernels.spec import Case, Fill, Operator, Role, TensorSpec, Tolerance

_DIMS = {"D": 16, "P": 4, "states": 5, "num_blocks": 12, "block_size": 16}


def _case(name: str, *new_tokens: int, starts: tuple[int, ...] = (), padded: int = 0, **dims: int) -> Case:
    sizes = _DIMS | dims
    return Case(
        name,
        sizes,
        new_tokens,
        starts or (0,) * len(new_tokens),
        {"block_size": sizes["block_size"]},
        padded_sequences=padded,
    )


OPERATORS = (
    Operator(
        name="index_pool",
        formula="pool_cache[row(p)] = sum_j softmax_j(gates[pP + j] + ape[j]) * keys[pP + j], per channel",
        tensors=(
            TensorSpec("keys", ("T", "D")),
            TensorSpec("gates", ("T", "D")),
            TensorSpec("ape", ("P", "D")),
            TensorSpec("tail", ("states", "P", 2, "D"), role=Role.CACHE, fill=Fill.POOL_TAIL),
            TensorSpec("pool_cache", ("num_blocks * block_size // P", "D"), role=Role.CACHE, fill=Fill.POOL_CACHE),
            TensorSpec("state_slots", ("B",), "int32", fill=Fill.STATE_SLOTS, ids="0 .. states - 1, -1 pads"),
            TensorSpec(
                "block_table", ("B", "max_blocks"), "int32", fill=Fill.BLOCK_TABLE, ids="0 .. num_blocks - 1, -1 pads"
            ),
            TensorSpec("cu_seqlens", ("B + 1",), "int32", fill=Fill.CU_SEQLENS),
            TensorSpec("start_positions", ("B",), "int32", fill=Fill.START_POSITIONS),
        ),
        outputs=(),
        scalars={"block_size": "tokens per block, a multiple of P"},
        cases=(
            _case("one", 1),
            _case("pool_minus_1", 3),
            _case("pool", 4),
            _case("pool_plus_1", 5),
            _case("block_minus_1", 15),
            _case("block", 16),
            _case("block_plus_1", 17),
            _case("continues_pool", 2, starts=(3,)),
            _case("closes_pool", 1, starts=(7,)),
            _case("inside_pool", 1, starts=(5,)),
            _case("last_of_block", 1, starts=(15,)),
            _case("packed", 9, 1, 30, 2, starts=(0, 6, 3, 18)),
            _case("decode", 1, 1, 1, 1, starts=(0, 3, 16, 31)),
            _case("some_padding", 6, 5, starts=(2, 3), padded=1),
            _case("empty_sequence", 4, 0, 5, starts=(0, 7, 1)),
            _case("no_token", 0),
            _case("pool_of_1", 5, starts=(3,), P=1),
            _case("pool_is_block", 18, starts=(0,), P=16),
        ),
        tolerance=Tolerance(
            {"float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}, {"float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}
        ),
    ),
)
