"""What sparse latent attention computes, for prefill and decode, as data."""

from day0_kernels.spec import Case, Fill, Operator, TensorSpec, Tolerance

_DIMS = {"H": 4, "R": 32, "W": 67, "num_blocks": 48, "block_size": 16}


def _case(name: str, *new_tokens: int, starts: tuple[int, ...] = (), value_dim: int = 32, **dims: int) -> Case:
    sizes = _DIMS | dims
    scalars = {"block_size": sizes["block_size"], "softmax_scale": 0.25, "value_dim": value_dim}
    return Case(name, sizes | {"V": value_dim}, new_tokens, starts or (0,) * len(new_tokens), scalars)


def _decode(name: str, *lengths: int, **dims: int) -> Case:
    return _case(name, *(1 for _ in lengths), starts=tuple(length - 1 for length in lengths), **dims)


_SCALARS = {
    "block_size": "tokens per block",
    "softmax_scale": "factor on q . latent before the softmax",
    "value_dim": "leading columns of a latent row that are its value",
}
_FORMULA = (
    "out = softmax_w(softmax_scale * q . latents[slot(topk_indices[w])]) @ latents[slot(...), :value_dim], -1 left out"
)
_LATENTS = TensorSpec("latents", ("num_blocks * block_size", "R"), fill=Fill.LATENT_CACHE)
_BLOCK_TABLE = TensorSpec(
    "block_table", ("B", "max_blocks"), "int32", fill=Fill.BLOCK_TABLE, ids="0 .. num_blocks - 1, -1 pads"
)
_TOLERANCE = Tolerance(
    {"float32": 5e-6, "bfloat16": 2e-2, "float16": 3e-3}, {"float32": 5e-6, "bfloat16": 2e-2, "float16": 3e-3}
)


def _topk(rows: str) -> TensorSpec:
    return TensorSpec(
        "topk_indices", (rows, "W"), "int32", fill=Fill.TOPK_INDICES, ids="positions 0 .. length - 1, -1 pads"
    )


_SINKS = TensorSpec("sinks", ("H",), "float32")
_SINKS_FORMULA = (
    "out = (exp(softmax_scale * q . latents) @ latents[..., :value_dim]) / (sum exp(softmax_scale * q . latents) + "
    "exp(sinks[h])), over slot(topk_indices[w])"
)


OPERATORS = (
    Operator(
        name="sparse_mla_prefill",
        formula=_FORMULA,
        tensors=(
            TensorSpec("q", ("T", "H", "R")),
            _LATENTS,
            _topk("T"),
            _BLOCK_TABLE,
            TensorSpec("cu_seqlens", ("B + 1",), "int32", fill=Fill.CU_SEQLENS),
        ),
        outputs=(TensorSpec("out", ("T", "H", "V")),),
        scalars=_SCALARS,
        cases=(
            _case("one", 1),
            _case("two", 2),
            _case("block_minus_1", 15),
            _case("block", 16),
            _case("block_plus_1", 17),
            _case("topk_minus_1", 63),
            _case("topk", 64),
            _case("topk_plus_1", 65),
            _case("sparse", 150),
            _case("packed", 70, 1, 3, 90, starts=(0, 63, 64, 5)),
            _case("empty_sequence", 2, 0, 5, starts=(70, 9, 0)),
            _case("no_token", 0),
            _case("narrow_value", 40, value_dim=24),
            _case("one_head", 40, H=1),
            _case("width_1", 20, W=1),
            _case("width_tile", 100, W=64),
            _case("width_above_context", 20, W=300),
        ),
        tolerance=_TOLERANCE,
    ),
    Operator(
        name="sparse_mla_decode",
        formula=_FORMULA,
        tensors=(TensorSpec("q", ("B", "H", "R")), _LATENTS, _topk("B"), _BLOCK_TABLE),
        outputs=(TensorSpec("out", ("B", "H", "V")),),
        scalars=_SCALARS,
        cases=(
            _decode("one", 1),
            _decode("two", 2),
            _decode("block_edges", 15, 16, 17),
            _decode("topk_edges", 63, 64, 65),
            _decode("sparse", 300),
            _decode("batch", 1, 70, 64, 129, 4, 33, 200, 17),
            _decode("padding_rows", 0, 80, 0),
            _decode("only_padding", 0),
            _decode("narrow_value", 40, 90, value_dim=24),
            _decode("width_above_context", 20, W=300),
        ),
        tolerance=_TOLERANCE,
    ),
    Operator(
        name="sparse_mla_sinks_prefill",
        formula=_SINKS_FORMULA,
        tensors=(
            TensorSpec("q", ("T", "H", "R")),
            _LATENTS,
            _topk("T"),
            _BLOCK_TABLE,
            TensorSpec("cu_seqlens", ("B + 1",), "int32", fill=Fill.CU_SEQLENS),
            _SINKS,
        ),
        outputs=(TensorSpec("out", ("T", "H", "V")),),
        scalars=_SCALARS,
        cases=(
            _case("one", 1),
            _case("topk_plus_1", 65),
            _case("packed", 70, 1, 3, 40, starts=(0, 63, 64, 5)),
            _case("empty_sequence", 2, 0, 5, starts=(70, 9, 0)),
            _case("no_token", 0),
            _case("narrow_value", 40, value_dim=24),
        ),
        tolerance=_TOLERANCE,
    ),
    Operator(
        name="sparse_mla_sinks_decode",
        formula=_SINKS_FORMULA,
        tensors=(TensorSpec("q", ("B", "H", "R")), _LATENTS, _topk("B"), _BLOCK_TABLE, _SINKS),
        outputs=(TensorSpec("out", ("B", "H", "V")),),
        scalars=_SCALARS,
        cases=(
            _decode("one", 1),
            _decode("batch", 1, 70, 64, 129, 4, 33, 200, 17),
            _decode("padding_rows", 0, 80, 0),
            _decode("only_padding", 0),
            _decode("narrow_value", 40, 90, value_dim=24),
        ),
        tolerance=_TOLERANCE,
    ),
)
