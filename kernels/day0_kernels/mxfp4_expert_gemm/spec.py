"""What the grouped expert product on MXFP4 weights computes, as data."""

from day0_kernels.spec import Case, Fill, Operator, TensorSpec, Tolerance


def _case(name: str, *expert_rows: int, din: int = 64, dout: int = 48) -> Case:
    return Case(name, {"Din": din, "Dout": dout}, expert_rows=expert_rows)


OPERATORS = (
    Operator(
        name="mxfp4_expert_gemm",
        formula="out[i] = decode(codes[e], scales[e]) @ x[i] for expert_offsets[e] <= i < expert_offsets[e + 1]",
        tensors=(
            TensorSpec("x", ("N", "Din")),
            TensorSpec("codes", ("E", "Dout", "Din // 2"), "uint8", fill=Fill.MXFP4_CODES),
            TensorSpec("scales", ("E", "Dout", "Din // 32"), "uint8", fill=Fill.MXFP4_WEIGHT_SCALES, ids="0 .. 254"),
            TensorSpec("expert_offsets", ("E + 1",), "int32", fill=Fill.EXPERT_OFFSETS, ids="0 .. N, not decreasing"),
        ),
        outputs=(TensorSpec("out", ("N", "Dout")),),
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
            _case("many", 33, 2, 64, 7, 0, 1, 18, 5),
            _case("one_expert", 20),
            _case("odd_group_count", 3, 4, din=96, dout=5),
            _case("deep", 3, 17, din=2112, dout=24),
        ),
        tolerance=Tolerance(
            {"float32": 5e-6, "bfloat16": 1e-2, "float16": 2e-3}, {"float32": 5e-6, "bfloat16": 1e-2, "float16": 2e-3}
        ),
    ),
)
