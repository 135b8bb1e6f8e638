"""What the quantising cache writes compute, as data."""

from day0_kernels.spec import EXACT, Case, Fill, Operator, Role, TensorSpec

_DIMS = {"num_blocks": 8, "block_size": 16}
_LATENT = {"V": 256, "R": 272}
_KEY = {"D": 16}


def _cases(dims: dict[str, int], scalars: dict[str, object]) -> tuple[Case, ...]:
    def case(name: str, *new_tokens: int, starts: tuple[int, ...] = (), padded: int = 0) -> Case:
        starts = starts or (0,) * len(new_tokens)
        return Case(name, _DIMS | dims, new_tokens, starts, scalars, padded_sequences=padded)

    return (
        case("one", 1),
        case("block_minus_1", 15),
        case("block", 16),
        case("block_plus_1", 17),
        case("packed", 5, 33, 1, starts=(3, 0, 15)),
        case("decode", 1, 1, 1, starts=(0, 15, 16)),
        case("some_padding", 3, 20, padded=1),
        case("all_padding", 4, padded=1),
        case("no_token", 0),
    )


_VALUE_DIM = {"value_dim": "leading columns of a row that are quantised, a multiple of 128; the rest stays bfloat16"}


def _slots(name: str) -> TensorSpec:
    return TensorSpec(name, ("T",), "int32", fill=Fill.SLOT_MAPPING, ids="0 .. S - 1, -1 skips the row")


_LATENTS = (
    TensorSpec("latents", ("T", "R")),
    TensorSpec(
        "latent_cache",
        ("num_blocks * block_size", "V + V // 128 * 4 + 2 * (R - V)"),
        "uint8",
        role=Role.CACHE,
        fill=Fill.UNWRITTEN_BYTES,
        ids="of a row V e4m3fn bits, then V / 128 float32 scales, then R - V bfloat16",
    ),
    _slots("slot_mapping"),
)
_KEYS = (
    TensorSpec("keys", ("T", "D")),
    TensorSpec(
        "key_cache",
        ("num_blocks", "block_size * (D + 4)"),
        "uint8",
        role=Role.CACHE,
        fill=Fill.UNWRITTEN_BYTES,
        ids="of a block first its keys of D e4m3fn bits, then as many float32 scales",
    ),
    _slots("key_slots"),
)
_ROUNDED = "scale = max(amax / 448, 2^-126) and e4m3(x / scale)"

OPERATORS = (
    Operator(
        name="latent_store_fp8",
        formula=f"latent_cache[slot_mapping[t]] = {_ROUNDED} of every 128 columns, bfloat16 behind value_dim",
        tensors=_LATENTS,
        outputs=(),
        scalars=_VALUE_DIM,
        cases=(
            *_cases(_LATENT, {"value_dim": 256}),
            Case("without_tail", _DIMS | {"V": 128, "R": 128}, (7,), (0,), {"value_dim": 128}),
            Case("mla", _DIMS | {"V": 512, "R": 576}, (7,), (0,), {"value_dim": 512}),
        ),
        tolerance=EXACT,
    ),
    Operator(
        name="index_key_store_fp8",
        formula=f"key_cache[key_slots[t]] = {_ROUNDED} of the row",
        tensors=_KEYS,
        outputs=(),
        scalars={},
        cases=(
            *_cases(_KEY, {}),
            Case("wide", _DIMS | {"D": 128}, (7,), (0,)),
            Case("no_power_of_two", _DIMS | {"D": 20}, (5,), (0,)),
        ),
        tolerance=EXACT,
    ),
    Operator(
        name="latent_and_key_store_fp8",
        formula="latent_store_fp8 and index_key_store_fp8",
        tensors=(*_LATENTS, *_KEYS),
        outputs=(),
        scalars=_VALUE_DIM,
        cases=_cases(_LATENT | _KEY, {"value_dim": 256}),
        tolerance=EXACT,
    ),
)
