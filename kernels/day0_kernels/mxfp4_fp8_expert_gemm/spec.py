"""What the grouped expert product of FP8 rows and MXFP4 weights computes, as data."""

from day0_kernels.spec import Case, Fill, Operator, TensorSpec, Tolerance


def _case(name: str, *expert_rows: int, din: int = 128, dout: int = 48, by_group: bool = False) -> Case:
    return Case(name, {"Din": din, "Dout": dout}, expert_rows=expert_rows, scalars={"by_group": by_group})


# The result is bfloat16 in every call. The tensor cores' sum of e4m3 products keeps some 14 bits.
_ABSOLUTE = dict.fromkeys(("float32", "bfloat16", "float16"), 3e-2)
_RELATIVE = dict.fromkeys(("float32", "bfloat16", "float16"), 1e-2)

OPERATORS = (
    Operator(
        name="mxfp4_fp8_expert_gemm",
        formula="out[i] = decode(codes[e], scales[e]) @ (x[i] * x_scales[i]), x in the order of fp8_quantise",
        tensors=(
            TensorSpec("x", ("N", "Din"), "uint8", fill=Fill.FP8_BITS, ids="e4m3fn bits, no NaN"),
            TensorSpec("x_scales", ("N", 1), "float32", fill=Fill.FP8_BLOCK_SCALES),
            TensorSpec("codes", ("E", "Dout", "Din // 2"), "uint8", fill=Fill.MXFP4_CODES),
            TensorSpec("scales", ("E", "Dout", "Din // 32"), "uint8", fill=Fill.MXFP4_WEIGHT_SCALES, ids="0 .. 254"),
            TensorSpec("tops", ("E", "Dout"), "uint8", fill=Fill.MXFP4_ROW_TOPS, ids="as mxfp4.row_tops, or larger"),
            TensorSpec("expert_offsets", ("E + 1",), "int32", fill=Fill.EXPERT_OFFSETS, ids="0 .. N, not decreasing"),
        ),
        outputs=(TensorSpec("out", ("N", "Dout"), "bfloat16"),),
        scalars={
            "by_group": "whether each group of 32 columns is scaled by itself: for few rows an expert, any scale byte"
        },
        cases=(
            _case("one_row", 0, 1, 0, 0),
            _case("first_and_last", 1, 0, 0, 1),
            _case("expert_without_token", 3, 0, 5, 2),
            _case("all_on_one", 0, 0, 37, 0),
            _case("all_on_first", 40, 0, 0, 0),
            _case("all_on_last", 0, 0, 0, 40),
            _case("no_token", 0, 0, 0, 0),
            _case("tile_edges", 15, 16, 17, 1),
            _case("large_tile_edges", 127, 128, 129, 1, dout=8),
            _case("many", 33, 2, 64, 7, 0, 1, 18, 5),
            _case("one_expert", 20),
            _case("odd_block_count", 3, 4, din=384, dout=5),
            _case("whole_tiles", 3, 17, 0, 129, din=256, dout=512),
            _case("deep", 3, 17, din=2304, dout=24),
            _case("by_group", 3, 0, 17, 1, by_group=True),
            _case("by_group_whole_tiles", 3, 17, 0, 129, din=256, dout=512, by_group=True),
            _case("by_group_no_token", 0, 0, by_group=True),
        ),
        tolerance=Tolerance(_ABSOLUTE, _RELATIVE),
    ),
)
