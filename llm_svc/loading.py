"""Turns a checkpoint into a runner and the pools that fit it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from llm_svc.adopt.families import FAMILIES, Family
from llm_svc.adopt.operators import resolve_operators
from llm_svc.adopt.rows import bind_linears
from llm_svc.build import LoadError, build_native, build_upstream, find_native, find_upstream
from llm_svc.cache.block_pool import BlockPool
from llm_svc.cache.state_slots import Snapshots, StateSlots
from llm_svc.cache.storage import layer_bytes
from llm_svc.decode_buckets import Buckets
from llm_svc.decode_steps import DecodeSteps
from llm_svc.dummy import build_dummy, dummy_sizes
from llm_svc.expert_setup import prepare_experts
from llm_svc.memory_check import MemoryNeed, check_memory
from llm_svc.model_runner import ModelFacts, Runner
from llm_svc.native_memory import WeightSizes, layer_allocation, native_need, refuse_host_residency
from llm_svc.native_model import NativeModel
from llm_svc.native_runner import NativeRunner
from llm_svc.scheduler import Scheduler, SchedulerLimits
from llm_svc.settings import LlmSettings
from llm_svc.upstream_runner import UpstreamRunner
from svc_common.checkpoint_source import CheckpointSource
from svc_common.logs import get_logger
from svc_common.threads import product_threads
from svc_common.weight_stream import Progress

_log = get_logger("day0.loading")

DELTA_CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that can run, and a scheduler over pools sized for it."""

    runner: Runner
    scheduler: Scheduler
    facts: ModelFacts


def load_model(
    settings: LlmSettings, source: CheckpointSource, progress: Progress = lambda done, expected: None
) -> LoadedModel:
    """Loads the checkpoint into the tier that the settings ask for; raises LoadError and ValueError."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise LoadError("device: cuda, and this process sees no CUDA device; use cpu")
    config = AutoConfig.from_pretrained(source.folder, local_files_only=True)
    family = FAMILIES.get(config.model_type)
    if settings.tier == "native" and family is None:
        raise LoadError(
            f"tier: native knows {', '.join(sorted(FAMILIES))}, and the model is {config.model_type}; use tier=upstream"
        )
    if settings.load_format == "dummy" and (settings.tier == "upstream" or family is None):
        raise LoadError("load_format: dummy is for the native tier; use checkpoint")
    if settings.tier == "upstream" or family is None:
        loaded = _load_upstream(source, config, settings, progress)
    else:
        loaded = _load_native(source, config, family, settings, progress)
    _log.info(
        "model loaded",
        extra={
            "architecture": loaded.facts.architecture,
            "tier": loaded.facts.tier,
            "dtype": loaded.facts.dtype,
            "cache_bytes": loaded.facts.cache_bytes,
        },
    )
    return loaded


def _load_native(
    source: CheckpointSource, config: PreTrainedConfig, family: Family, settings: LlmSettings, progress: Progress
) -> LoadedModel:
    """Whatever cannot work is refused before the first weight is read."""
    text_config = config.get_text_config()
    family.check(text_config, settings.block_size)
    delta_chunk_tokens = _delta_chunk_tokens(settings.block_size)
    device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
    operators, resolved = resolve_operators(device, dtype)
    scheduler = _native_scheduler(settings)
    allocate = layer_allocation(settings, family, text_config)
    weights = None if settings.load_format == "dummy" else find_native(source, config, family)
    if weights is None:
        sizes = dummy_sizes(config, family, dtype)
    else:
        sizes = WeightSizes(weights.resident_bytes(dtype), weights.packed_bytes(), len(weights.packed))
    plan, need = native_need(settings, family, text_config, resolved, sizes)
    check_memory(settings, need)
    experts_device = torch.device("cpu") if settings.experts_residency == "host" else device
    if weights is None:
        model = build_dummy(config, family, dtype, device=device, experts_device=experts_device)
    else:
        model = build_native(weights, config, family, dtype, progress, device=device, experts_device=experts_device)
    layers = allocate(device=device)
    language_model, lm_head = family.parts(model)
    _set_threads(model, settings)
    bind_linears(language_model)
    bind_linears(lm_head)
    experts = prepare_experts(language_model, plan, operators, resolved, settings, device=device, dtype=dtype)
    facts = replace(
        _facts(config, model, "native", settings, layer_bytes(layers)),
        operator_backends={found.operator.name: found.backend for found in resolved},
        experts_residency=settings.experts_residency,
        experts_convert_tokens=experts.product.convert_tokens,
    )
    native = NativeModel(
        language_model=language_model,
        lm_head=lm_head,
        layer_types=frozenset(text_config.layer_types),
        operators=operators,
        packed_product=experts.product,
        workspace=experts.workspace,
        layers=layers,
        block_size=settings.block_size,
        delta_chunk_tokens=delta_chunk_tokens,
        device=device,
    )
    steps = _decode_steps(native, settings, facts, scheduler.blocks.num_blocks, packed=plan is not None)
    return LoadedModel(NativeRunner(native, facts, steps), scheduler, facts)


def _delta_chunk_tokens(block_size: int) -> int:
    chunk = min(DELTA_CHUNK_TOKENS, block_size)
    if block_size % chunk:
        raise ValueError(f"block_size {block_size} must divide or be a multiple of {DELTA_CHUNK_TOKENS}")
    return chunk


def _decode_steps(
    model: NativeModel, settings: LlmSettings, facts: ModelFacts, num_blocks: int, *, packed: bool
) -> DecodeSteps | None:
    """Steps to capture as CUDA graphs; None, and the reason in the log, where every step is launched from Python."""
    if settings.device != "cuda":
        return None
    rows, why = settings.max_running_sequences, ""
    unused = {"mxfp4_to_fp8", "fp8_expert_gemm", "expert_gemm" if packed else "mxfp4_expert_gemm"}
    references = sorted(
        name
        for name, backend in facts.operator_backends.items()
        if backend == "reference" and name not in unused and not name.endswith("_prefill")
    )
    if settings.decode_graphs == "off":
        why = "decode_graphs is off"
    elif references:
        why = f"references ask the host in the middle of a step: {', '.join(references)}"
    elif facts.experts_residency == "host":
        why = "experts_residency host chooses in every step what to copy"
    elif 0 < facts.experts_convert_tokens <= rows:
        # A converted product asks the host which experts have rows.
        rows = facts.experts_convert_tokens - 1
        why = "" if rows else "experts_convert_tokens is 1"
    if why:
        _log.info("decode steps are not captured", extra={"reason": why})
        return None
    blocks = min(num_blocks, -(-facts.context_tokens // settings.block_size))
    return DecodeSteps(model, Buckets(rows, blocks, settings.block_size), facts.vocab_size)


def _native_scheduler(settings: LlmSettings) -> Scheduler:
    limits = SchedulerLimits(
        max_batch_tokens=settings.max_batch_tokens,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        max_running_sequences=settings.max_running_sequences,
        prefix_cache=settings.prefix_cache,
    )
    return Scheduler(
        limits,
        BlockPool(settings.cache_tokens // settings.block_size, settings.block_size),
        StateSlots(settings.max_running_sequences),
        # Without a prefix cache nobody looks for a state, and no prompt needs to be cut where one would be kept.
        Snapshots(settings.max_snapshots) if settings.prefix_cache else None,
    )


def _load_upstream(
    source: CheckpointSource, config: PreTrainedConfig, settings: LlmSettings, progress: Progress
) -> LoadedModel:
    """One sequence at a time: one state slot, blocks that only count tokens, the whole prompt in one forward."""
    dtype = getattr(torch, settings.dtype)
    weights = find_upstream(source, config)
    refuse_host_residency(settings)
    check_memory(settings, MemoryNeed(weights.resident_bytes(dtype)))
    model = build_upstream(weights, config, dtype, progress).to(settings.device)
    _set_threads(model, settings)
    facts = _facts(config, model, "upstream", settings, 0)
    context = facts.context_tokens
    limits = SchedulerLimits(
        max_batch_tokens=context + 1, prefill_chunk_tokens=0, max_running_sequences=1, prefix_cache=False
    )
    blocks = BlockPool(-(-context // settings.block_size), settings.block_size)
    scheduler = Scheduler(limits, blocks, StateSlots(1), None)
    return LoadedModel(UpstreamRunner(model, facts, torch.device(settings.device)), scheduler, facts)


def _set_threads(model: nn.Module, settings: LlmSettings) -> None:
    widest = max((m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear)), default=0)
    if threads := product_threads(settings.threads, widest):
        torch.set_num_threads(threads)


def _facts(config: PreTrainedConfig, model: Any, tier: str, settings: LlmSettings, cache_bytes: int) -> ModelFacts:
    text_config = config.get_text_config()
    context = int(text_config.max_position_embeddings)
    if settings.max_context_tokens:
        context = min(context, settings.max_context_tokens)
    takes_images = bool(settings.vision_target) and config.model_type in FAMILIES
    return ModelFacts(
        architecture=type(model).__name__,
        tier=tier,
        context_tokens=context,
        vocab_size=int(text_config.vocab_size),
        dtype=settings.dtype,
        visual_hidden=int(text_config.hidden_size) if takes_images else 0,
        image_token_id=getattr(config, "image_token_id", None),
        operator_backends={},
        cache_bytes=cache_bytes,
    )
