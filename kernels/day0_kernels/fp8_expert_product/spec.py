"""What the grouped expert product of FP8 rows and FP8 weights computes, as data."""

from day0_kernels.spec import Case, Fill, Operator, TensorSpec, Tolerance


def _case(name: str, *expert_rows: int, din: int = 64, dout: int = 48) -> Case:
    return Case(name, {"Din": din, "Dout": dout}, expert_rows=expert_rows)


_BLOCKS = ("E", "(Dout + 127) // 128", "(Din + 127) // 128")
# The result is bfloat16 in every call.
_ABSOLUTE = dict.fromkeys(("float32", "bfloat16", "float16"), 5e-4)
_RELATIVE = dict.fromkeys(("float32", "bfloat16", "float16"), 5e-3)

OPERATORS = (
    Operator(
        name="fp8_expert_product",
        formula="out[i] = (weight[e] * block_scales[e, n // 128, k // 128]) @ (x[i] * x_scales[i, k // 128])",
        tensors=(
            TensorSpec("x", ("N", "Din"), "uint8", fill=Fill.FP8_BITS, ids="e4m3fn bits, no NaN"),
            TensorSpec("x_scales", ("N", "(Din + 127) // 128"), "float32", fill=Fill.FP8_BLOCK_SCALES),
            TensorSpec("weight", ("E", "Dout", "Din"), "uint8", fill=Fill.FP8_BITS, ids="e4m3fn bits, no NaN"),
            TensorSpec("block_scales", _BLOCKS, "float32", fill=Fill.FP8_BLOCK_SCALES),
            TensorSpec("expert_offsets", ("E + 1",), "int32", fill=Fill.EXPERT_OFFSETS, ids="0 .. N, not decreasing"),
        ),
        outputs=(TensorSpec("out", ("N", "Dout"), "bfloat16"),),
        scalars={},
        cases=(
            _case("one_row", 0, 1, 0, 0),
            _case("first_and_last", 1, 0, 0, 1),
            _case("expert_without_token", 3, 0, 5, 2),
            _case("all_on_one", 0, 0, 37, 0),
            _case("all_on_first", 40, 0, 0, 0),
            _case("all_on_last", 0, 0, 0, 40),
            _case("no_token", 0, 0, 0, 0),
            _case("tile_edges", 15, 16, 17, 1),
            _case("large_tile_edges", 127, 128, 129, 1, din=128, dout=8),
            _case("many", 33, 2, 64, 7, 0, 1, 18, 5),
            _case("one_expert", 20),
            _case("odd_sizes", 3, 4, din=7, dout=5),
            _case("one_block", 2, 1, din=128, dout=128),
            _case("row_edge", 2, 3, din=32, dout=129),
            _case("column_edge", 2, 3, din=144, dout=3),
            _case("both_edges", 1, 2, din=304, dout=130),
            _case("two_blocks_of_outputs", 1, 2, din=256, dout=260),
            _case("deep", 3, 17, din=2112, dout=24),
        ),
        tolerance=Tolerance(_ABSOLUTE, _RELATIVE),
    ),
)
