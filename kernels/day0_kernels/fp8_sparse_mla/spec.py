"""What sparse latent attention over an FP8 cache computes, for prefill and decode, as data."""

from day0_kernels.spec import Case, Fill, Operator, TensorSpec, Tolerance

_DIMS = {"H": 3, "V": 128, "R": 136, "W": 67, "num_blocks": 48, "block_size": 16}


def _case(name: str, *new_tokens: int, starts: tuple[int, ...] = (), **dims: int) -> Case:
    sizes = _DIMS | dims
    scalars = {"block_size": sizes["block_size"], "softmax_scale": 0.1, "value_dim": sizes["V"]}
    return Case(name, sizes, new_tokens, starts or (0,) * len(new_tokens), scalars)


def _decode(name: str, *lengths: int, **dims: int) -> Case:
    return _case(name, *(1 for _ in lengths), starts=tuple(length - 1 for length in lengths), **dims)


_SCALARS = {
    "block_size": "tokens per block",
    "softmax_scale": "factor on q . latent before the softmax",
    "value_dim": "leading columns of a latent that are its value, and that are e4m3 in the cache",
}
_FORMULA = (
    "out = softmax_w(softmax_scale * q . latent[w]) @ latent[w, :value_dim], -1 left out, "
    "latent[w] = (e4m3 codes * scale of their 128, bfloat16 tail) of cache[slot(topk_indices[w])]"
)
_CACHE = TensorSpec(
    "cache",
    ("num_blocks * block_size", "V + V // 128 * 4 + 2 * (R - V)"),
    "uint8",
    fill=Fill.FP8_LATENT_CACHE,
)
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


OPERATORS = (
    Operator(
        name="fp8_sparse_mla_prefill",
        formula=_FORMULA,
        tensors=(
            TensorSpec("q", ("T", "H", "R")),
            _CACHE,
            _topk("T"),
            _BLOCK_TABLE,
            TensorSpec("cu_seqlens", ("B + 1",), "int32", fill=Fill.CU_SEQLENS),
        ),
        outputs=(TensorSpec("out", ("T", "H", "V")),),
        scalars=_SCALARS,
        cases=(
            _case("one", 1),
            _case("block_edges", 15, 16, 17),
            _case("topk_plus_1", 68),
            _case("packed", 30, 1, 3, 40, starts=(0, 63, 64, 5)),
            _case("empty_sequence", 2, 0, 5, starts=(70, 9, 0)),
            _case("no_token", 0),
            _case("without_tail", 20, R=128),
            _case("two_groups", 20, V=256, R=264),
            _case("width_1", 20, W=1),
            _case("width_above_context", 20, W=130),
        ),
        tolerance=_TOLERANCE,
    ),
    Operator(
        name="fp8_sparse_mla_decode",
        formula=_FORMULA,
        tensors=(TensorSpec("q", ("B", "H", "R")), _CACHE, _topk("B"), _BLOCK_TABLE),
        outputs=(TensorSpec("out", ("B", "H", "V")),),
        scalars=_SCALARS,
        cases=(
            _decode("one", 1),
            _decode("two", 2),
            _decode("block_edges", 15, 16, 17),
            _decode("topk_edges", 66, 67, 68),
            _decode("tile_edges", 63, 64, 65, 127, 128, 129, W=130),
            _decode("batch", 1, 70, 64, 129, 4, 33, 200, 17),
            _decode("padding_rows", 0, 80, 0),
            _decode("only_padding", 0),
            _decode("without_tail", 40, 90, R=128),
            _decode("four_groups", 40, 90, V=512, R=576),
            _decode("width_above_context", 20, W=300),
        ),
        tolerance=_TOLERANCE,
    ),
)
