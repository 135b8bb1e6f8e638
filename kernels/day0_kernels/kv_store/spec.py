"""What the KV store computes, as data."""

from day0_kernels.spec import EXACT, Case, Fill, Operator, Role, TensorSpec

_ROW = {"D": 24, "num_blocks": 8, "block_size": 16}


def _case(name: str, *new_tokens: int, starts: tuple[int, ...] = (), padded: int = 0, width: int = 24) -> Case:
    return Case(name, _ROW | {"D": width}, new_tokens, starts or (0,) * len(new_tokens), padded_sequences=padded)


OPERATORS = (
    Operator(
        name="kv_store",
        formula="cache[slot_mapping[t]] = rows[t] where slot_mapping[t] >= 0",
        tensors=(
            TensorSpec("rows", ("T", "D")),
            TensorSpec("cache", ("num_blocks * block_size", "D"), role=Role.CACHE, fill=Fill.ROW_CACHE),
            TensorSpec("slot_mapping", ("T",), "int32", fill=Fill.SLOT_MAPPING, ids="0 .. S - 1, -1 skips the row"),
        ),
        outputs=(),
        scalars={},
        cases=(
            _case("one", 1),
            _case("block_minus_1", 15),
            _case("block", 16),
            _case("block_plus_1", 17),
            _case("packed", 5, 33, 1, starts=(3, 0, 15)),
            _case("decode", 1, 1, 1, starts=(0, 15, 16)),
            _case("some_padding", 3, 20, padded=1),
            _case("all_padding", 4, padded=1),
            _case("no_token", 0),
            _case("one_column", 7, width=1),
        ),
        tolerance=EXACT,
    ),
)
