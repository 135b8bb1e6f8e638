"""Says what kind of part a module class is and which operators of ours compute such a part; it binds nothing.

A kind is told by what the module has and does, and by its class name where nothing else tells. The libraries are those
measured beside our operators.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from day0.inventory.definition import ATTENTION_INTERFACE, seam_of
from day0.inventory.operator_trace import is_routed


@dataclass(frozen=True, slots=True)
class Kind:
    """`operators` of ours compute such a part; `lacking` says what it does that none of them does.

    `package` names software of others that has it.
    """

    name: str
    operators: tuple[str, ...] = ()
    lacking: str = ""
    package: str = ""


PLAIN = Kind("plain torch")
_DELTA = Kind(
    "delta attention",
    ("short_conv_prefill", "short_conv_decode", "gated_delta_prefill", "gated_delta_decode"),
    package="flash-linear-attention",
)
_SPARSE_LATENT = Kind(
    "sparse latent attention", ("kv_store", "sparse_mla_prefill", "sparse_mla_decode"), package="FlashMLA"
)
_INDEXER = Kind("indexer", ("index_select_prefill", "index_select_decode"), package="DeepGEMM and FlashInfer top-k")
_POOLED_INDEXER = Kind("pooled indexer", ("index_pool", *_INDEXER.operators), package=_INDEXER.package)
_EXPERTS = Kind("experts", ("expert_gemm",), package="torch grouped_mm, DeepGEMM")
_STREAMS = Kind("residual streams", ("hc_pre_norm", "hc_post"))
_BANK = Kind("attention over residuals", ("attention_residual",), package="flash-attn-res")
_GATE = Kind("gate", ("select_experts",))
_CONVOLUTION = Kind("short convolution", ("short_conv_prefill", "short_conv_decode"), package="causal-conv1d")
_SCAN = Kind("state space scan", (), "no operator of ours scans a state space", "mamba-ssm")
_COMPRESSION = Kind("compressed attention entries", (), "no operator of ours compresses tokens to entries")

_HASH_GATE = Kind("gate by a table", (), "no operator of ours looks experts up by token")
_DYNAMIC = Kind("convolution with computed weights", (), "short_conv has one set of weights for all tokens")
_SINKS = Kind(
    "sparse latent attention with sinks",
    ("kv_store", "sparse_mla_sinks_prefill", "sparse_mla_sinks_decode"),
    package="FlashMLA",
)
_LATENT_SIZES = ("sparse latent attention", "latent attention", _SINKS.name)

_NAMES: tuple[tuple[str, Kind], ...] = (
    (r"HyperConnection$", _STREAMS),
    (r"(AttentionResidual|AttnRes)$", _BANK),
    (r"(GatedDeltaNet|DeltaAttention|LinearAttention|DeltaNet)$", _DELTA),
    (r"Mamba\w*(Mixer|Block)$", _SCAN),
    (r"Compressor$", _COMPRESSION),
    (r"Dynamic\w*Convolution$", _DYNAMIC),
    (r"ShortConvolution$", _CONVOLUTION),
    (r"HashRouter$", _HASH_GATE),
    (r"(Router|(?<!Forget)Gate)$", _GATE),
)


def kind_of(module: nn.Module, called: frozenset[str]) -> Kind:
    """The kind of one module; `called` are the names of torch operators that its class itself calls."""
    cls = type(module)
    if not cls.__module__.startswith("transformers."):
        return PLAIN
    if is_routed(module) or cls.__name__.endswith("Experts"):
        return _EXPERTS
    if cls.__name__.endswith("Indexer"):
        return _POOLED_INDEXER if getattr(module, "index_kpool", 1) > 1 else _INDEXER
    for pattern, kind in _NAMES:
        if re.search(pattern, cls.__name__):
            return kind
    if seam_of(cls) != ATTENTION_INTERFACE:
        return PLAIN
    return _attention(module, called)


def _attention(module: nn.Module, called: frozenset[str]) -> Kind:
    sinks = any("sink" in name for name, _ in module.named_parameters(recurse=False))
    if hasattr(module, "kv_b_proj"):
        if getattr(module, "indexer", None) is not None or hasattr(module, "skip_topk"):
            return _SPARSE_LATENT
        return Kind("latent attention", ("kv_store", "paged_mla_decode"), "prefill runs torch's own", "FlashMLA")
    if "topk" in called or any("ndexer" in type(child).__name__ for child in module.children()):
        return Kind("block-sparse attention", (), "no operator of ours attends to chosen blocks of keys")
    if any("PositionBias" in type(child).__name__ for child in module.children()):
        return Kind("attention with a position bias", (), "paged_gqa_decode adds no bias", "torch flex_attention")
    if sinks and getattr(getattr(module, "config", None), "num_key_value_heads", 0) == 1:
        return _SINKS
    if sinks:
        return Kind("attention with sinks", (), "paged_gqa_decode has no sinks", "FlashAttention 3")
    if getattr(module, "sliding_window", None) or getattr(module, "is_sliding", False):
        return Kind("sliding attention", (), "paged_gqa_decode has no window", "FlashAttention")
    return Kind("attention", ("kv_store", "paged_gqa_decode"), "prefill runs torch's own", "FlashAttention")


def sizes_of(kind: Kind, module: Any, config: Any) -> Mapping[str, int]:
    """The dimensions our specs name, as far as module and configuration tell them; used to ask backends."""

    def find(*names: str) -> int | None:
        for source in (module, config):
            for name in names:
                value = getattr(source, name, None)
                if isinstance(value, int) and not isinstance(value, bool):
                    return value
        return None

    sizes: dict[str, int | None] = {}
    if kind.name in _LATENT_SIZES:
        rank, rope = find("kv_lora_rank"), find("qk_rope_head_dim") or 0
        width = find("head_dim") if rank is None else rank + rope
        sizes = {"H": find("num_heads", "num_attention_heads"), "V": rank or width, "R": width}
    elif kind.name == "attention":
        sizes = {
            "H": find("num_attention_heads", "num_heads"),
            "HKV": find("num_key_value_heads"),
            "D": find("head_dim"),
        }
    elif kind in (_INDEXER, _POOLED_INDEXER):
        sizes = {"HI": find("n_heads", "num_heads", "index_n_heads"), "D": find("head_dim", "index_head_dim")}
        sizes["P"] = find("index_kpool") or 1
    elif kind is _STREAMS:
        sizes = {"M": find("hc_mult", "hc_count", "num_streams"), "D": find("hidden_size")}
    elif kind is _BANK:
        sizes = {"D": find("hidden_size")}
    elif kind is _GATE:
        sizes = {"E": find("num_experts", "num_local_experts", "n_routed_experts"), "K": find("num_experts_per_tok")}
    elif kind.name.startswith("experts"):
        stacked = next((p for p in module.parameters(recurse=False) if p.dim() == 3), None)
        if stacked is not None:
            # Backends refuse what is no multiple of a power of two: the side that is the least such is asked about.
            sizes = {"E": len(stacked), "Din": min(stacked.shape[1:], key=lambda side: side & -side)}
    return {name: size for name, size in sizes.items() if size is not None}


def operator_sizes(kind: Kind, operator: str, module: Any, config: Any) -> Mapping[str, int]:
    """`sizes_of` for one operator: convolution and delta rule call different things K."""
    if kind is not _DELTA and kind is not _CONVOLUTION:
        return sizes_of(kind, module, config)
    if operator.startswith("short_conv"):
        kernel = next((p for p in module.parameters() if p.dim() == 3), None)
        return {} if kernel is None else {"C": kernel.shape[0], "K": kernel.shape[2]}
    keys = ("head_k_dim", "key_head_dim", "head_dim", "linear_key_head_dim")
    found = next((getattr(module, name) for name in keys if isinstance(getattr(module, name, None), int)), None)
    return {} if found is None else {"K": found}
