"""Cases with whole tiles and more parts than one, which the specs' small ones have not; only a GPU runs them fast."""

from __future__ import annotations

from collections.abc import Mapping

from day0_kernels import registry
from day0_kernels.spec import Case

_MIX = {"norm_eps": 1e-5, "hc_eps": 1e-6, "sinkhorn_iters": 20}
_ATTEND = {"logit_scale": 1.0, "norm_eps": 1e-6, "normed_values": False}
_GATE = {"score": "sigmoid", "top_k": 8, "groups": 1, "topk_groups": 1, "normalise": True, "scaling": 2.5}


def _latents(name: str, heads: int, width: int, new: tuple[int, ...], starts: tuple[int, ...]) -> Case:
    """2,048 chosen positions and the tail of a pool, over latents of 512 value columns."""
    blocks = sum(-(-(start + count) // 64) for start, count in zip(starts, new, strict=True)) + 9
    dims = {"H": heads, "R": width, "V": 512, "W": 2063, "num_blocks": blocks, "block_size": 64}
    return Case(name, dims, new, starts, {"block_size": 64, "softmax_scale": 0.07, "value_dim": 512})


_LATENTS_DECODE = (
    # As many rows as let one program go over all runs of a row; the last one alone has a program for each run.
    _latents("in_turn", 64, 512, (1,) * 98, (*(13 * b for b in range(97)), 2100)),
    _latents("apart", 64, 512, (1,) * 11, (0, 62, 63, 127, 128, 639, 640, 1279, 1280, 2000, 2062)),
    _latents("two_groups", 128, 576, (1,) * 9, (0, 700, 64, 1279, 1280, 1281, 300, 2500, 511)),
    _latents("part_of_heads", 17, 576, (1,) * 97, (*(7 * b for b in range(96)), 2200)),
)

MORE_CASES: Mapping[str, tuple[Case, ...]] = {
    "mxfp4_expert_gemm": (
        Case("whole_blocks", {"Din": 256, "Dout": 130}, expert_rows=(1, 0, 17)),
        Case("wide_tiles", {"Din": 1024, "Dout": 384}, expert_rows=(40, 0, 15, 129)),
        Case("middle_tiles", {"Din": 1024, "Dout": 384}, expert_rows=(0, 17, 20, 33)),
        Case("few_rows", {"Din": 768, "Dout": 384}, expert_rows=(3, 0, 9, 1)),
    ),
    "mxfp4_fp8_expert_gemm": tuple(
        Case(
            f"{name}{'_by_group' * by_group}",
            {"Din": 768, "Dout": 512},
            expert_rows=rows,
            scalars={"by_group": by_group},
        )
        for by_group in (False, True)
        for name, rows in (("few", (3, 0, 9, 1)), ("some", (0, 17, 20, 33)), ("many_experts", (130, 0, 128, 260, 127)))
    ),
    "fp8_expert_gemm": (
        Case("wide_tiles", {"Din": 1024, "Dout": 384}, expert_rows=(40, 0, 15, 129)),
        Case("middle_tiles", {"Din": 1024, "Dout": 384}, expert_rows=(0, 17, 20, 33)),
    ),
    "fp8_expert_product": (
        Case("wide_tiles", {"Din": 1024, "Dout": 384}, expert_rows=(40, 0, 15, 129)),
        Case("narrow_tiles", {"Din": 1024, "Dout": 384}, expert_rows=(1, 0, 17, 2)),
        Case("large_tiles", {"Din": 1024, "Dout": 384}, expert_rows=(129, 0, 128, 40)),
    ),
    "select_experts": (Case("glm_prefill", {"E": 288, "K": 8}, (1025,), (0,), _GATE),),
    "permute_rows": (Case("glm", {"K": 8, "E": 288, "D": 4096}, (700,), (0,), {"experts": 288}),),
    "unpermute_rows": (Case("glm", {"K": 8, "N": 5600, "D": 4096}, (700,), (0,)),),
    "sparse_mla_prefill": (
        _latents("glm", 64, 512, (70, 1, 3, 0, 90), (0, 640, 1300, 5, 2000)),
        _latents("deepseek", 128, 576, (5, 33), (1500, 0)),
        _latents("part_of_heads", 17, 576, (40,), (60,)),
    ),
    "sparse_mla_decode": _LATENTS_DECODE,
    "sparse_mla_sinks_prefill": (_latents("part_of_heads", 17, 512, (40, 5), (60, 700)),),
    "sparse_mla_sinks_decode": _LATENTS_DECODE,
    # 600 tokens have another configuration than one has alone.
    "hc_pre": (
        Case("many_parts", {"M": 4, "D": 4096}, (70,), (0,), _MIX),
        Case("other_tiles", {"M": 4, "D": 1024}, (600,), (0,), _MIX),
    ),
    "hc_pre_norm": (Case("other_tiles", {"M": 4, "D": 4096}, (600,), (0,), _MIX | {"layer_norm_eps": 1e-6}),),
    "attention_residual": (Case("wide", {"N": 9, "Q": 1, "D": 7168}, (20,), (0,), _ATTEND),),
    "hc_post": (Case("wide", {"M": 4, "D": 4096}, (70,), (0,)),),
    "mxfp4_to_fp8": (Case("blocks", {"E": 3, "N": 512, "K": 1024}),),
}


def cases(name: str) -> tuple[Case, ...]:
    """The spec's cases of an operator and the larger ones of here."""
    return (*registry.operator(name).cases, *MORE_CASES.get(name, ()))
