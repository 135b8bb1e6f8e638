"""What the gated delta rule computes, for prefill and decode, as data."""

from day0_kernels.spec import Case, Fill, Operator, Role, TensorSpec, Tolerance

_DIMS = {"H": 4, "K": 16, "V": 16, "states": 9}
_CHUNK = 64


def _case(name: str, *new_tokens: int, starts: tuple[int, ...] = (), padded: int = 0, **dims: int) -> Case:
    sizes = _DIMS | dims
    scalars = {"scale": sizes["K"] ** -0.5, "l2norm_eps": 1e-6, "chunk_size": _CHUNK}
    return Case(name, sizes, new_tokens, starts or (0,) * len(new_tokens), scalars, padded_sequences=padded)


def _decode(name: str, *starts: int, padded: int = 0, **dims: int) -> Case:
    sizes = _DIMS | dims
    scalars = {"scale": sizes["K"] ** -0.5, "l2norm_eps": 1e-6}
    return Case(name, sizes, (1,) * len(starts), starts, scalars, padded_sequences=padded)


def _tokens(rows: str) -> tuple[TensorSpec, ...]:
    return (
        TensorSpec("q", (rows, "H", "K")),
        TensorSpec("k", (rows, "H", "K")),
        TensorSpec("v", (rows, "H", "V")),
        TensorSpec("g", (rows, "H", "K"), fill=Fill.LOG_GATE),
        TensorSpec("beta", (rows, "H"), fill=Fill.RATE),
        TensorSpec("state", ("states", "H", "K", "V"), "float32", role=Role.CACHE, fill=Fill.STATE_CACHE),
        TensorSpec("state_slots", ("B",), "int32", fill=Fill.STATE_SLOTS, ids="0 .. states - 1, -1 pads"),
    )


_SCALARS = {"scale": "factor on the normalised q", "l2norm_eps": "added to the sum of squares of q and of k"}
_FORMULA = "S = exp(g) * S; S += k (beta * (v - k^T S))^T; out = S^T q, with q and k l2-normalised and q scaled"
_TOLERANCE = Tolerance(
    {"float32": 5e-6, "bfloat16": 2e-2, "float16": 5e-3}, {"float32": 5e-6, "bfloat16": 2e-2, "float16": 5e-3}
)

OPERATORS = (
    Operator(
        name="gated_delta_prefill",
        formula=_FORMULA,
        tensors=(*_tokens("T"), TensorSpec("cu_seqlens", ("B + 1",), "int32", fill=Fill.CU_SEQLENS)),
        outputs=(TensorSpec("out", ("T", "H", "V")),),
        scalars=_SCALARS | {"chunk_size": "tokens per chunk, a multiple of 16"},
        cases=(
            _case("one", 1),
            _case("sub_chunk_edges", 15, 16, 17),
            _case("chunk_minus_1", _CHUNK - 1),
            _case("chunk", _CHUNK),
            _case("chunk_plus_1", _CHUNK + 1),
            _case("two_chunks_plus_5", 2 * _CHUNK + 5),
            _case("three_chunks", 3 * _CHUNK),
            _case("continued", 70, starts=(9,)),
            _case("packed", 1, 130, 64, 7, starts=(0, 9, 3, 0)),
            _case("empty_sequence", 2, 0, 5, starts=(3, 4, 0)),
            _case("some_padding", 6, 65, starts=(2, 3), padded=1),
            _case("no_token", 0),
            _case("wide_value", 70, V=24),
            _case("one_head", 66, H=1),
        ),
        tolerance=_TOLERANCE,
        judged_as_called=("state",),
    ),
    Operator(
        name="gated_delta_decode",
        formula=_FORMULA,
        tensors=_tokens("B"),
        outputs=(TensorSpec("out", ("B", "H", "V")),),
        scalars=_SCALARS,
        cases=(
            _decode("one", 0),
            _decode("batch", 0, 1, 2, 3, 4, 5, 60, 7),
            _decode("padding_rows", 3, 4, 5, padded=2),
            _decode("only_padding", 3, padded=1),
            _decode("wide_value", 7, 8, V=24),
        ),
        tolerance=_TOLERANCE,
    ),
)
