"""What the short causal convolution computes, for prefill and decode, as data."""

from day0_kernels.spec import Case, Fill, Operator, Role, TensorSpec, Tolerance

_DIMS = {"C": 48, "K": 4, "states": 9}


def _case(name: str, *new_tokens: int, starts: tuple[int, ...] = (), padded: int = 0, **dims: int) -> Case:
    activation = None if name == "no_activation" else "silu"
    starts = starts or (0,) * len(new_tokens)
    return Case(name, _DIMS | dims, new_tokens, starts, {"activation": activation}, padded_sequences=padded)


def _decode(name: str, *starts: int, padded: int = 0, **dims: int) -> Case:
    return _case(name, *(1 for _ in starts), starts=starts, padded=padded, **dims)


_WEIGHT = TensorSpec("weight", ("C", "K"))
_STATE = TensorSpec("conv_state", ("states", "C", "K - 1"), role=Role.CACHE, fill=Fill.STATE_CACHE)
_SLOTS = TensorSpec("state_slots", ("B",), "int32", fill=Fill.STATE_SLOTS, ids="0 .. states - 1, -1 pads")
_SCALARS = {"activation": "'silu' or None"}
_FORMULA = "y[t] = activation(sum_j weight[:, j] * x[t - K + 1 + j]), inputs before the call from conv_state"
_TOLERANCE = Tolerance(
    {"float32": 2e-6, "bfloat16": 2e-2, "float16": 3e-3}, {"float32": 2e-6, "bfloat16": 1e-2, "float16": 2e-3}
)

OPERATORS = (
    Operator(
        name="short_conv_prefill",
        formula=_FORMULA,
        tensors=(
            TensorSpec("x", ("T", "C")),
            _WEIGHT,
            _STATE,
            _SLOTS,
            TensorSpec("cu_seqlens", ("B + 1",), "int32", fill=Fill.CU_SEQLENS),
        ),
        outputs=(TensorSpec("y", ("T", "C")),),
        scalars=_SCALARS,
        cases=(
            _case("one", 1),
            _case("kernel_minus_1", 3),
            _case("kernel", 4),
            _case("kernel_plus_1", 5),
            _case("long", 65),
            _case("continued", 9, starts=(7,)),
            _case("packed", 1, 2, 3, 40, 5, starts=(0, 9, 3, 0, 1)),
            _case("empty_sequence", 2, 0, 5, starts=(3, 4, 0)),
            _case("some_padding", 6, 5, starts=(2, 3), padded=1),
            _case("no_token", 0),
            _case("no_activation", 11),
            _case("odd_channels", 3, 4, starts=(0, 5), C=7),
            _case("kernel_of_2", 6, starts=(1,), K=2),
        ),
        tolerance=_TOLERANCE,
    ),
    Operator(
        name="short_conv_decode",
        formula=_FORMULA,
        tensors=(TensorSpec("x", ("B", "C")), _WEIGHT, _STATE, _SLOTS),
        outputs=(TensorSpec("y", ("B", "C")),),
        scalars=_SCALARS,
        cases=(
            _decode("one", 0),
            _decode("batch", 0, 1, 2, 3, 4, 5, 60, 7),
            _decode("padding_rows", 3, 4, 5, padded=2),
            _decode("only_padding", 3, padded=1),
            _decode("no_activation", 8, 2),
            _decode("odd_channels", 3, 4, 5, C=7),
            _decode("kernel_of_2", 6, K=2),
        ),
        tolerance=_TOLERANCE,
    ),
)
