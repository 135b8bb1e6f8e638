"""What the gates before and behind the delta rule compute, as data."""

from day0_kernels.spec import Case, Fill, Operator, TensorSpec, Tolerance

_DIMS = {"H": 3, "K": 16, "V": 16}
_FLOAT32 = {"float32": 5e-6, "bfloat16": 1e-2, "float16": 2e-3}


def _gates(name: str, tokens: int, lower_bound: float | None = -5.0, **dims: int) -> Case:
    return Case(name, _DIMS | dims, (tokens,), (0,), {"lower_bound": lower_bound})


def _norm(name: str, tokens: int, **dims: int) -> Case:
    return Case(name, _DIMS | dims, (tokens,), (0,), {"norm_eps": 1e-5})


OPERATORS = (
    Operator(
        name="delta_gates",
        formula=(
            "x = forget + dt_bias; g = lower_bound * sigmoid(exp(a_log) * x), unbounded -exp(a_log) * softplus(x); "
            "beta = sigmoid(rate)"
        ),
        tensors=(
            TensorSpec("forget", ("T", "H", "K")),
            TensorSpec("rate", ("T", "H")),
            TensorSpec("dt_bias", ("H * K",), "float32"),
            TensorSpec("a_log", ("H",), "float32"),
        ),
        outputs=(TensorSpec("g", ("T", "H", "K"), "float32"), TensorSpec("beta", ("T", "H"))),
        scalars={"lower_bound": "the smallest log gate; None for none"},
        cases=(
            _gates("one", 1),
            _gates("several", 9),
            _gates("no_bound", 5, None),
            _gates("one_head", 4, H=1),
            _gates("odd_sizes", 3, H=5, K=7),
            _gates("beyond_a_block", 2, H=9, K=128),
            _gates("no_token", 0),
        ),
        tolerance=Tolerance(_FLOAT32, _FLOAT32),
    ),
    Operator(
        name="gated_norm",
        formula="out = norm_weight * x / sqrt(mean(x^2) + norm_eps) * sigmoid(gate), a mean for each head",
        tensors=(
            TensorSpec("x", ("T", "H", "V")),
            TensorSpec("gate", ("T", "H", "V")),
            TensorSpec("norm_weight", ("V",), fill=Fill.NORMAL),
        ),
        outputs=(TensorSpec("out", ("T", "H", "V")),),
        scalars={"norm_eps": "added to the mean square"},
        cases=(
            _norm("one", 1),
            _norm("several", 9),
            _norm("one_head", 4, H=1),
            _norm("odd_sizes", 3, H=5, V=7),
            _norm("wide", 2, V=256),
            _norm("no_token", 0),
        ),
        tolerance=Tolerance(_FLOAT32, _FLOAT32),
    ),
)
