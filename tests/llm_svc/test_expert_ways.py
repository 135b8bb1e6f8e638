"""Experts fused or through FP8: the same bits whichever way is taken, one arena for all layers, nothing rounded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Glm5NextForConditionalGeneration

from day0_kernels.comparison import same_bits
from day0_kernels.mxfp4 import decode
from day0_kernels.workspace import Workspace
from llm_svc import expert_setup
from llm_svc.crossover import Crossover, Timing
from llm_svc.loading import LoadedModel
from llm_svc.settings import LlmSettings
from tests.llm_svc.checkpoints import load
from tests.llm_svc.conftest import Sample, Upstream
from tests.llm_svc.packed import Tensors, read, write
from tests.llm_svc.stepping import step_all
from tests.llm_svc.test_packed_experts import compressed_tensors
from tests.llm_svc.test_parity import request_of, wrong
from tests.loopback import LlmOnLoopback

NEW_TOKENS = 6
LAYERS, EXPERTS, TOP_K = 3, 8, 2
GATE_UP_BYTES = 64 * 64


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every lease of the workspace starts as NaN."""
    monkeypatch.setattr(expert_setup, "Workspace", partial(Workspace, poison=True))


def load_packed(folder: Path, **settings: Any) -> LoadedModel:
    return load(LlmSettings(model=str(folder), block_size=16, threads=1, **settings))


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, 500, (length,), generator=generator).tolist() for length in (1, 17, 40, 130)]


@pytest.fixture(scope="module")
def fused_alone(packed_checkpoint: Path) -> list[torch.Tensor]:
    """Logits of each prompt by itself, never converted."""
    model = load_packed(packed_checkpoint, experts_convert_tokens=0)
    assert model.runner.workspace is None and model.facts.experts_convert_tokens == 0
    return [step_all(model, [prompt], NEW_TOKENS)[0] for prompt in prompts()]


def check_same(got: list[torch.Tensor], want: list[torch.Tensor]) -> None:
    assert all(same_bits(mine, theirs) for mine, theirs in zip(got, want, strict=True))


@pytest.mark.parametrize("convert_tokens", [1, 2, 17, 41])
def test_bits_do_not_depend_on_the_way(
    packed_checkpoint: Path, fused_alone: list[torch.Tensor], convert_tokens: int
) -> None:
    """Alone some prompts are below the count and some above; together nearly all are above."""
    model = load_packed(packed_checkpoint, experts_convert_tokens=convert_tokens)
    assert model.facts.experts_convert_tokens == convert_tokens
    check_same([step_all(model, [prompt], NEW_TOKENS)[0] for prompt in prompts()], fused_alone)
    alone = model.runner.expert_counts.converted
    assert alone > 0 and model.runner.expert_counts.kept_mxfp4 == 0
    check_same(step_all(model, prompts(), NEW_TOKENS), fused_alone)
    assert model.runner.expert_counts.converted > alone


def test_nor_do_narrow_floats(packed_checkpoint: Path) -> None:
    fused = load_packed(packed_checkpoint, experts_convert_tokens=0, dtype="bfloat16")
    converted = load_packed(packed_checkpoint, experts_convert_tokens=30, dtype="bfloat16")
    check_same(step_all(converted, prompts(), NEW_TOKENS), step_all(fused, prompts(), NEW_TOKENS))
    assert converted.runner.expert_counts.converted > 0


@pytest.mark.parametrize("experts", [1, 3])
def test_a_workspace_of_few_experts_is_used_in_turns(
    packed_checkpoint: Path, fused_alone: list[torch.Tensor], experts: int
) -> None:
    settings = {"experts_convert_tokens": 1, "experts_workspace_bytes": experts * GATE_UP_BYTES + 1}
    model = load_packed(packed_checkpoint, **settings)
    check_same(step_all(model, prompts(), NEW_TOKENS), fused_alone)
    assert model.runner.workspace is not None
    assert model.runner.workspace.capacity_bytes == model.runner.workspace.high_water_bytes == experts * GATE_UP_BYTES


def spy(model: LoadedModel, **wrappers: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    product = model.runner.model.packed_product
    operators = product._operators
    product._operators = replace(operators, **{name: wrap(getattr(operators, name)) for name, wrap in wrappers.items()})


def test_decode_takes_its_scratch_from_the_one_arena(packed_checkpoint: Path) -> None:
    model = load_packed(packed_checkpoint, experts_convert_tokens=1)
    workspace = model.runner.workspace
    assert workspace is not None and workspace.capacity_bytes == EXPERTS * GATE_UP_BYTES
    arena = workspace._arena.data_ptr()
    seen: list[int] = []

    def watched(product: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor) -> Any:
            seen.append(weight.data_ptr())
            return product(x, weight, *rest)

        return call

    spy(model, fp8_expert_gemm=watched)
    step_all(model, prompts(), NEW_TOKENS)
    assert len(seen) >= 2 * LAYERS * NEW_TOKENS and set(seen) == {arena}
    assert (workspace._arena.data_ptr(), workspace.capacity_bytes) == (arena, EXPERTS * GATE_UP_BYTES)
    assert 0 < workspace.high_water_bytes <= workspace.capacity_bytes


def test_only_experts_with_tokens_are_converted(packed_checkpoint: Path) -> None:
    model = load_packed(packed_checkpoint, experts_convert_tokens=1)
    converted: list[int] = []
    owned: list[int] = []

    def converting(convert: Callable[..., Any]) -> Callable[..., Any]:
        def call(codes: torch.Tensor, scales: torch.Tensor, fp8: torch.Tensor) -> Any:
            converted.append(len(codes))
            return convert(codes, scales, fp8)

        return call

    def multiplying(product: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: torch.Tensor, weight: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor) -> Any:
            owned.append(sum(first < end for first, end in pairwise(offsets.tolist())))
            assert owned[-1] == len(weight) == len(scales)
            return product(x, weight, scales, offsets)

        return call

    spy(model, mxfp4_to_fp8=converting, fp8_expert_gemm=multiplying)
    step_all(model, [[7]], 1)
    assert owned == [TOP_K] * 2 * LAYERS and sum(converted) == sum(owned)
    assert model.runner.expert_counts.converted == sum(owned)


# What FP8 cannot hold.


@pytest.fixture(scope="module")
def wide_checkpoint(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, int]:
    """Two experts of the middle layer whose scales spread beyond 14, one by gate and one by down; and it decoded."""
    tensors = read(tiny_checkpoint)
    decoded: Tensors = {}
    plain = dict(tensors)
    quantization = compressed_tensors(tensors, decoded)
    for expert, projection in ((0, "gate_proj"), (5, "down_proj")):
        name = f"model.language_model.layers.2.mlp.experts.{expert}.{projection}.weight"
        codes, scales = tensors[f"{name}_packed"], tensors[f"{name}_scale"]
        scales[::2] -= 13
        scales[1::2] += 2
        decoded[name] = decode(codes, scales)
    base = tmp_path_factory.mktemp("wide")
    packed = write(tiny_checkpoint, base / "packed", tensors, quantization)
    return packed, write(tiny_checkpoint, base / "decoded", plain | decoded, None), 2


def test_experts_beyond_fp8_take_the_mxfp4_product(
    wide_checkpoint: tuple[Path, Path, int], caplog: pytest.LogCaptureFixture
) -> None:
    packed, _, kept = wide_checkpoint
    never = step_all(load_packed(packed, experts_convert_tokens=0), prompts(), NEW_TOKENS)
    with caplog.at_level("WARNING"):
        model = load_packed(packed, experts_convert_tokens=1)
    (record,) = [record for record in caplog.records if record.name == "day0.experts"]
    assert (record.layer, record.experts) == ("layers.2.mlp.experts", kept)
    check_same(step_all(model, prompts(), NEW_TOKENS), never)
    assert all(logits.isfinite().all() for logits in never)
    counts = model.runner.expert_counts
    assert 0 < counts.kept_mxfp4 < counts.converted


def test_tokens_equal_upstream_though_some_experts_are_beyond_fp8(
    wide_checkpoint: tuple[Path, Path, int], upstream: Upstream, samples: list[Sample]
) -> None:
    packed, decoded, _ = wide_checkpoint
    model = Glm5NextForConditionalGeneration.from_pretrained(decoded).eval()
    reference = Upstream(model, upstream.tokenizer, upstream.processor)
    some = [sample for sample in samples if sample.name in ("text-17", "text-300")]
    with LlmOnLoopback(packed, images=False, experts_convert_tokens=20) as service:
        assert wrong(reference, some, service.ask_all([request_of(sample) for sample in some])) == []
        assert service.metric("day0_experts_converted_total") > service.metric("day0_experts_kept_mxfp4_total") > 0


# From how many tokens on.


def test_the_measured_count_is_served(
    packed_checkpoint: Path, fused_alone: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Crossover(40, (Timing(40, 2.0, 1.0),))
    monkeypatch.setattr(expert_setup, "measure_crossover", lambda *args, **kwargs: found)
    model = load_packed(packed_checkpoint)
    assert model.facts.experts_convert_tokens == 40 and model.runner.workspace is not None
    check_same(step_all(model, prompts(), NEW_TOKENS), fused_alone)
    assert model.runner.expert_counts.converted > 0


def test_scratch_that_will_never_be_used_goes_back(packed_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_setup, "measure_crossover", lambda *args, **kwargs: Crossover(0, ()))
    model = load_packed(packed_checkpoint)
    assert model.facts.experts_convert_tokens == 0 and model.runner.workspace is None


def test_float_experts_need_neither_measuring_nor_scratch(tiny_checkpoint: Path) -> None:
    model = load_packed(tiny_checkpoint, experts_convert_tokens=1)
    assert model.facts.experts_convert_tokens == 0 and model.runner.workspace is None
