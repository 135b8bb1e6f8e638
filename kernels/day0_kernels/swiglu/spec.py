"""What the gate between an expert's two products computes, as data."""

from day0_kernels.spec import FLOAT, Case, Operator, TensorSpec, Tolerance

_GLM = {"limit": 10.0, "alpha": 1.0, "up_offset": 0.0}
_GPT_OSS = {"limit": 7.0, "alpha": 1.702, "up_offset": 1.0}
_SCALARS = {
    "limit": "gate is clamped to at most this, up to at most this magnitude; None for no clamp",
    "alpha": "factor of gate within its sigmoid",
    "up_offset": "what is added to up",
}


def _case(name: str, rows: int, width: int, **scalars: object) -> Case:
    return Case(name, {"F": width}, (rows,), (0,), {**_GLM, **scalars})


_CASES = (
    _case("one", 1, 128),
    _case("several", 9, 256),
    _case("unclamped", 5, 128, limit=None),
    _case("gpt_oss", 5, 384, **_GPT_OSS),
    _case("wide", 2, 2176),
    _case("no_token", 0, 128),
)
_FLOAT32 = {"float32": 5e-6, "bfloat16": 1e-2, "float16": 2e-3}
_FORMULA = "g * sigmoid(alpha * g) * (u + up_offset), g = min(gate, limit), u = clamp(up, -limit, limit)"

OPERATORS = (
    Operator(
        name="swiglu",
        formula=f"out = {_FORMULA}",
        tensors=(TensorSpec("gate_up", ("T", "2 * F"), FLOAT),),
        outputs=(TensorSpec("out", ("T", "F"), FLOAT),),
        scalars=_SCALARS,
        cases=(*_CASES, _case("clamped", 5, 128, limit=0.5), _case("odd_width", 3, 7), _case("block_plus_1", 3, 1025)),
        tolerance=Tolerance(_FLOAT32, _FLOAT32),
    ),
    Operator(
        name="swiglu_fp8",
        formula=f"values * scales = {_FORMULA}, a scale for 128 columns: their largest magnitude / 448",
        tensors=(TensorSpec("gate_up", ("T", "2 * F"), FLOAT),),
        outputs=(TensorSpec("values", ("T", "F"), "uint8"), TensorSpec("scales", ("T", "F // 128"), "float32")),
        scalars=_SCALARS,
        # Where clamps work, values lie halfway between two codes, and the last bit of a sigmoid decides.
        cases=_CASES,
        tolerance=Tolerance(_FLOAT32, _FLOAT32),
    ),
)
