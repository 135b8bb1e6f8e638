"""What the quantisation of rows to FP8 computes, as data."""

from day0_kernels.spec import EXACT, Case, Operator, TensorSpec


def _case(name: str, rows: int, columns: int, group: int, *, mxfp4_order: bool = False) -> Case:
    return Case(
        name,
        {"N": rows, "Din": columns, "G": -(-columns // group)},
        scalars={"group": group, "mxfp4_order": mxfp4_order},
    )


OPERATORS = (
    Operator(
        name="fp8_quantise",
        formula="q[i, k] = e4m3fn(x[i, k] / x_scales[i, k // group]), scales 2^(floor(log2(largest of the group)) - 7)",
        tensors=(TensorSpec("x", ("N", "Din")),),
        outputs=(TensorSpec("q", ("N", "Din"), "uint8"), TensorSpec("x_scales", ("N", "G"), "float32")),
        scalars={
            "group": "columns that share a scale: 128, or all of them",
            "mxfp4_order": "whether each 128 columns are stored as the MXFP4 product takes them; Din % 128 is 0 then",
        },
        cases=(
            _case("one", 1, 128, 128),
            _case("no_row", 0, 256, 128),
            _case("row_scale", 3, 300, 300),
            _case("odd_width", 2, 7, 7),
            _case("groups", 5, 384, 128),
            _case("last_group_smaller", 2, 129, 128),
            _case("ordered", 3, 256, 256, mxfp4_order=True),
            _case("ordered_groups", 2, 384, 128, mxfp4_order=True),
        ),
        tolerance=EXACT,
    ),
)
