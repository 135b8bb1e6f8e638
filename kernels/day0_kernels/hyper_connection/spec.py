"""What hyper-connection mixing computes, before and after a sub-layer, as data."""

from day0_kernels.spec import Case, Fill, Operator, TensorSpec, Tolerance

_DIMS = {"M": 2, "D": 64}


def _case(name: str, tokens: int, scalars: dict[str, object], **dims: int) -> Case:
    return Case(name, _DIMS | dims, (tokens,), (0,), scalars)


_LENGTHS = {"one": 1, "tile_minus_1": 15, "tile": 16, "tile_plus_1": 17, "many": 130, "no_token": 0}
_PRE: dict[str, object] = {"norm_eps": 1e-5, "hc_eps": 1e-6, "sinkhorn_iters": 20}
_STREAMS = TensorSpec("streams", ("T", "M", "D"))
_TOLERANCE = Tolerance(
    {"float32": 5e-6, "bfloat16": 3e-2, "float16": 5e-3}, {"float32": 5e-6, "bfloat16": 2e-2, "float16": 5e-3}
)

_MIXING = (
    _STREAMS,
    TensorSpec("fn", ("(2 + M) * M", "M * D"), "float32", fill=Fill.WEIGHT),
    TensorSpec("base", ("(2 + M) * M",), "float32"),
    TensorSpec("scale", (3,), "float32"),
)
_WEIGHTS = (TensorSpec("post", ("T", "M"), "float32"), TensorSpec("comb", ("T", "M", "M"), "float32"))
_SCALARS = {
    "norm_eps": "added to the mean square",
    "hc_eps": "added to weights and sums",
    "sinkhorn_iters": "rounds",
}
_FORMULA = (
    "w = (rms_norm(flat) @ fn^T) * scale + base; pre, post by sigmoid, comb by softmax and Sinkhorn-Knopp; "
    "collapsed = sum_m pre[m] * streams[m]"
)

OPERATORS = (
    Operator(
        name="hc_pre",
        formula=_FORMULA,
        tensors=_MIXING,
        outputs=(*_WEIGHTS, TensorSpec("collapsed", ("T", "D"))),
        scalars=_SCALARS,
        cases=(
            *(_case(name, tokens, _PRE) for name, tokens in _LENGTHS.items()),
            _case("four_streams", 9, _PRE, M=4),
            _case("odd_width", 9, _PRE, D=7),
            _case("one_round", 9, _PRE | {"sinkhorn_iters": 1}),
        ),
        tolerance=_TOLERANCE,
    ),
    Operator(
        name="hc_pre_norm",
        formula=_FORMULA + "; normed = norm_weight * rms_norm(collapsed)",
        tensors=(*_MIXING, TensorSpec("norm_weight", ("D",))),
        outputs=(*_WEIGHTS, TensorSpec("normed", ("T", "D"))),
        scalars=_SCALARS | {"layer_norm_eps": "added to the mean square of the collapsed stream"},
        cases=(
            *(_case(name, tokens, _PRE | {"layer_norm_eps": 1e-6}) for name, tokens in _LENGTHS.items()),
            _case("four_streams", 9, _PRE | {"layer_norm_eps": 1e-5}, M=4),
            _case("odd_width", 9, _PRE | {"layer_norm_eps": 1e-6}, D=7),
        ),
        tolerance=_TOLERANCE,
    ),
    Operator(
        name="hc_post",
        formula="new[m] = post[m] * out + sum_n comb[n, m] * streams[n]",
        tensors=(
            _STREAMS,
            TensorSpec("out", ("T", "D")),
            TensorSpec("post", ("T", "M"), "float32", fill=Fill.RATE),
            TensorSpec("comb", ("T", "M", "M"), "float32", fill=Fill.RATE),
        ),
        outputs=(TensorSpec("mixed", ("T", "M", "D")),),
        scalars={},
        cases=(
            *(_case(name, tokens, {}) for name, tokens in _LENGTHS.items()),
            _case("four_streams", 9, {}, M=4),
            _case("odd_width", 9, {}, D=7),
        ),
        tolerance=_TOLERANCE,
    ),
)
