"""What decode attention over every cached token of a sequence computes, as data."""

from day0_kernels.spec import Case, Fill, Operator, TensorSpec, Tolerance

_DIMS = {"num_blocks": 48, "block_size": 16}
_LATENT = {"H": 3, "V": 32, "R": 40}
_PAIRS = {"H": 6, "HKV": 2, "D": 64}


def _case(name: str, sizes: dict[str, int], *lengths: int, **scalars: int) -> Case:
    sizes = _DIMS | sizes
    starts = tuple(length - 1 for length in lengths)
    scalars = {"block_size": sizes["block_size"], **scalars}
    return Case(name, sizes, (1,) * len(lengths), starts, scalars | {"softmax_scale": 0.2})


def _latent(name: str, *lengths: int, **dims: int) -> Case:
    sizes = _LATENT | dims
    return _case(name, sizes, *lengths, value_dim=sizes["V"])


def _pairs(name: str, *lengths: int, **dims: int) -> Case:
    return _case(name, _PAIRS | dims, *lengths)


_BLOCK_TABLE = TensorSpec(
    "block_table", ("B", "max_blocks"), "int32", fill=Fill.BLOCK_TABLE, ids="0 .. num_blocks - 1, -1 pads"
)
_SEQ_LENS = TensorSpec("seq_lens", ("B",), "int32", fill=Fill.SEQ_LENS)
_SCALARS = {"block_size": "tokens per block", "softmax_scale": "factor on q . key before the softmax"}
_TOLERANCE = Tolerance(
    {"float32": 5e-6, "bfloat16": 2e-2, "float16": 3e-3}, {"float32": 5e-6, "bfloat16": 2e-2, "float16": 3e-3}
)


OPERATORS = (
    Operator(
        name="paged_mla_decode",
        formula="out = softmax_p(softmax_scale * q . latents[slot(p)]) @ latents[slot(p), :value_dim], p < seq_lens",
        tensors=(
            TensorSpec("q", ("B", "H", "R")),
            TensorSpec("latents", ("num_blocks * block_size", "R"), fill=Fill.LATENT_CACHE),
            _BLOCK_TABLE,
            _SEQ_LENS,
        ),
        outputs=(TensorSpec("out", ("B", "H", "V")),),
        scalars=_SCALARS | {"value_dim": "leading columns of a latent row that are its value"},
        cases=(
            _latent("one", 1),
            _latent("two", 2),
            _latent("block_edges", 15, 16, 17),
            _latent("tile_edges", 63, 64, 65),
            _latent("batch", 1, 70, 129, 4, 200),
            _latent("padding_rows", 0, 80, 0),
            _latent("only_padding", 0),
            _latent("without_tail", 40, 33, R=32),
            _latent("one_head", 40, H=1),
        ),
        tolerance=_TOLERANCE,
    ),
    Operator(
        name="paged_gqa_decode",
        formula="out[h] = softmax_p(softmax_scale * q[h] . key_cache[slot(p), g]) @ value_cache[slot(p), g], "
        "p < seq_lens, g = h // (H / HKV)",
        tensors=(
            TensorSpec("q", ("B", "H", "D")),
            TensorSpec("key_cache", ("num_blocks * block_size", "HKV", "D"), fill=Fill.LATENT_CACHE),
            TensorSpec("value_cache", ("num_blocks * block_size", "HKV", "D"), fill=Fill.LATENT_CACHE),
            _BLOCK_TABLE,
            _SEQ_LENS,
        ),
        outputs=(TensorSpec("out", ("B", "H", "D")),),
        scalars=_SCALARS,
        cases=(
            _pairs("one", 1),
            _pairs("two", 2),
            _pairs("block_edges", 15, 16, 17),
            _pairs("tile_edges", 63, 64, 65),
            _pairs("batch", 1, 70, 129, 4, 200),
            _pairs("padding_rows", 0, 80, 0),
            _pairs("only_padding", 0),
            _pairs("every_head_its_own", 40, H=2, HKV=2),
            _pairs("sixteen_a_group", 40, 17, H=16, HKV=1, D=128),
        ),
        tolerance=_TOLERANCE,
    ),
)
