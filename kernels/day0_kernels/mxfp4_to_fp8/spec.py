"""What the conversion of MXFP4 weights to FP8 computes, as data."""

from day0_kernels.spec import EXACT, Case, Fill, Operator, Role, TensorSpec


def _case(name: str, experts: int, rows: int, columns: int) -> Case:
    return Case(name, {"E": experts, "N": rows, "K": columns})


_BLOCKS = ("E", "(N + 127) // 128", "(K + 127) // 128")

OPERATORS = (
    Operator(
        name="mxfp4_to_fp8",
        formula="fp8[e, n, k] * block_scales[e, n // 128, k // 128] = value(code) * 2^(scale - 127), bit for bit",
        tensors=(
            TensorSpec("codes", ("E", "N", "K // 2"), "uint8", fill=Fill.MXFP4_CODES),
            TensorSpec("scales", ("E", "N", "K // 32"), "uint8", fill=Fill.MXFP4_BLOCK_SCALES, ids="0 .. 254"),
            TensorSpec("fp8", ("E", "N", "K"), "uint8", Role.CACHE, Fill.UNWRITTEN_BYTES),
        ),
        outputs=(TensorSpec("block_scales", _BLOCKS, "float32"), TensorSpec("spans", _BLOCKS, "int32")),
        scalars={},
        cases=(
            _case("one_group", 1, 1, 32),
            _case("one_block", 1, 128, 128),
            _case("row_edges", 2, 129, 32),
            _case("odd_group_count", 2, 5, 96),
            _case("column_edges", 1, 3, 416),
            _case("both_edges", 3, 130, 160),
            _case("no_expert", 0, 4, 64),
        ),
        tolerance=EXACT,
    ),
)
