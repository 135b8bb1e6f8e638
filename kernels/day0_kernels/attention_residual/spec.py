"""What attention over the residual bank computes, as data."""

from day0_kernels.spec import Case, Fill, Operator, TensorSpec, Tolerance

_DIMS = {"N": 3, "Q": 1, "D": 64}
_PLAIN: dict[str, object] = {"logit_scale": 1.0, "norm_eps": 1e-6, "normed_values": False}
# As Inkling2 has it: the values are normed too.
_NORMED: dict[str, object] = {"logit_scale": 8.0, "norm_eps": 1e-6, "normed_values": True}


def _case(name: str, tokens: int, scalars: dict[str, object], **dims: int) -> Case:
    return Case(name, _DIMS | dims, (tokens,), (0,), scalars)


OPERATORS = (
    Operator(
        name="attention_residual",
        formula="unit[n] = rms_norm(sources[n]); p = softmax_n(logit_scale * query . unit[n]); "
        "out = sum_n p[n] * (unit[n] if normed_values else sources[n])",
        tensors=(
            TensorSpec("sources", ("T", "N", "D")),
            TensorSpec("query", ("Q", "D"), "float32", fill=Fill.WEIGHT),
        ),
        outputs=(TensorSpec("out", ("T", "Q", "D")),),
        scalars={
            "logit_scale": "factor on query . unit before the softmax",
            "norm_eps": "added to the mean square",
            "normed_values": "whether the normed sources are mixed, or the sources as they are",
        },
        cases=(
            _case("one", 1, _PLAIN),
            _case("no_token", 0, _PLAIN),
            _case("many", 40, _PLAIN),
            _case("one_source", 5, _PLAIN, N=1),
            _case("two_sources", 5, _PLAIN | {"logit_scale": 8.0}, N=2),
            _case("nine_sources", 5, _PLAIN | {"logit_scale": 8.0}, N=9),
            _case("most_sources", 5, _NORMED, N=17),
            _case("odd_width", 5, _PLAIN, D=7),
            _case("width_above_a_power", 3, _PLAIN, D=65),
            _case("normed_values", 5, _NORMED),
            _case("three_queries", 5, _NORMED, Q=3, N=5),
        ),
        tolerance=Tolerance(
            {"float32": 5e-6, "bfloat16": 2e-2, "float16": 3e-3}, {"float32": 5e-6, "bfloat16": 1e-2, "float16": 2e-3}
        ),
    ),
)
