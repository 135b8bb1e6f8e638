"""What the gate's choice, the sorting of rows by expert and the weighted way back compute, as data."""

from typing import Any

from day0_kernels.spec import EXACT, Case, Fill, Operator, TensorSpec, Tolerance

_GLM: dict[str, Any] = {
    "score": "sigmoid",
    "top_k": 8,
    "groups": 1,
    "topk_groups": 1,
    "normalise": True,
    "scaling": 2.5,
}


def _select(name: str, tokens: int, experts: int, **scalars: Any) -> Case:
    scalars = {**_GLM, **scalars}
    return Case(name, {"E": experts, "K": scalars["top_k"]}, (tokens,), (0,), scalars)


def _move(name: str, tokens: int, top_k: int, experts: int = 6, width: int = 40) -> Case:
    return Case(name, {"K": top_k, "E": experts, "D": width}, (tokens,), (0,), {"experts": experts})


def _back(name: str, tokens: int, top_k: int, width: int = 40) -> Case:
    return Case(name, {"K": top_k, "N": tokens * top_k, "D": width}, (tokens,), (0,))


_FLOAT32 = {"float32": 5e-6, "bfloat16": 1e-2, "float16": 2e-3}

OPERATORS = (
    Operator(
        name="select_experts",
        formula="topk_ids = the top_k largest of score(logits) + bias in the best groups; topk_weights = their scores",
        tensors=(TensorSpec("logits", ("T", "E"), "float32"), TensorSpec("bias", ("E",), "float32")),
        outputs=(TensorSpec("topk_ids", ("T", "K"), "int32"), TensorSpec("topk_weights", ("T", "K"), "float32")),
        scalars={
            "score": "sigmoid, softmax (over all experts) or sqrt_softplus",
            "top_k": "experts of a token, K",
            "groups": "groups of E / groups neighbouring experts; 1 for none",
            "topk_groups": "groups a token may choose from",
            "normalise": "whether the weights of a token are divided by their sum + 1e-20",
            "scaling": "factor of every weight",
        },
        cases=(
            _select("glm", 5, 288),
            _select("one_expert", 3, 1, top_k=1),
            _select("all_experts", 4, 8),
            _select("odd_count", 6, 37, top_k=5),
            _select("power_of_two", 3, 64),
            _select("many", 17, 65, top_k=3),
            _select("grouped", 7, 256, groups=8, topk_groups=4),
            _select("small_groups", 9, 12, groups=6, topk_groups=2, top_k=4),
            _select("odd_groups", 5, 15, groups=5, topk_groups=3, top_k=7),
            _select("groups_too_small", 4, 12, groups=4, topk_groups=1, top_k=5),
            _select("softmax", 5, 32, score="softmax", top_k=4, scaling=1.0),
            _select("sqrt_softplus", 5, 40, score="sqrt_softplus", top_k=6),
            _select("not_normalised", 5, 20, top_k=2, normalise=False, scaling=1.0),
            _select("no_token", 0, 16, top_k=2),
        ),
        tolerance=Tolerance(_FLOAT32, _FLOAT32),
    ),
    Operator(
        name="permute_rows",
        formula="rows[places[t, k]] = x[t], the rows of an expert in the order of t, k; expert_offsets counts them",
        tensors=(
            TensorSpec("x", ("T", "D")),
            TensorSpec("topk_ids", ("T", "K"), "int32", fill=Fill.EXPERT_IDS, ids="0 .. E - 1; any other has no row"),
        ),
        outputs=(
            TensorSpec("rows", ("T * K", "D")),
            TensorSpec("expert_offsets", ("E + 1",), "int32"),
            TensorSpec("places", ("T", "K"), "int32"),
        ),
        scalars={"experts": "number of experts, E"},
        cases=(
            _move("one", 1, 1),
            _move("token_plus_1", 9, 8),
            _move("one_expert", 4, 2, experts=1),
            _move("chunk_minus_1", 85, 3),
            _move("chunk", 64, 4),
            _move("chunk_plus_1", 257, 1, experts=3),
            _move("many_experts", 100, 8, experts=288, width=8),
            _move("odd_width", 5, 3, width=7),
            _move("wide", 3, 2, width=2100),
            _move("no_token", 0, 4),
        ),
        tolerance=EXACT,
    ),
    Operator(
        name="unpermute_rows",
        formula="out[t] = sum over k, in order, of topk_weights[t, k] * rows[places[t, k]]",
        tensors=(
            TensorSpec("rows", ("N", "D")),
            TensorSpec("topk_weights", ("T", "K"), "float32"),
            TensorSpec("places", ("T", "K"), "int32", fill=Fill.ROW_PLACES, ids="0 .. N - 1; -1 has no row"),
        ),
        outputs=(TensorSpec("out", ("T", "D")),),
        scalars={},
        cases=(
            _back("one", 1, 1),
            _back("several", 9, 8),
            _back("odd_width", 5, 3, width=7),
            _back("wide", 3, 2, width=2100),
            _back("no_token", 0, 4),
        ),
        tolerance=Tolerance(_FLOAT32, _FLOAT32),
    ),
)
