"""What the engine must show on a GPU: captured steps with the CPU's tokens, and layers no further off than upstream's.

`python -m tests.gpu.engine` says what it saw; `test_engine_on_gpu.py` is the same as tests.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Mapping
from collections.abc import Sequence as Prompts
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration

from day0.embedded import embedded_model
from day0_kernels.mxfp4 import decode
from llm_svc.core import Prompt, PromptTokens, Request, SamplingParams, Sequence
from llm_svc.decode_steps import DecodeSteps
from llm_svc.loading import LoadedModel
from llm_svc.native_runner import NativeRunner
from llm_svc.settings import LlmSettings
from llm_svc.warm_up import warm_up
from tests.llm_svc.checkpoints import load
from tests.llm_svc.test_golden_logits import golden, spans

# Tokens may part only where the CPU's two best logits were closer than this.
LEAST_GAP = 1e-2
# Of a layer's error in bfloat16, ours to upstream's.
MOST_TIMES_UPSTREAM = 1.5
LAYER_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Parting:
    """The first token in which GPU and CPU differ, and the gap between the CPU's two best logits there."""

    prompt: str
    place: int
    gap: float


@dataclass(frozen=True, slots=True)
class LayerError:
    """Relative errors against upstream in float32: ours and upstream's own, both in bfloat16."""

    name: str
    ours: float
    upstream: float

    @property
    def times(self) -> float:
        """Ours to upstream's."""
        return self.ours / self.upstream


def embedded(device: str, dtype: str = "float32") -> LoadedModel:
    """The embedded model, ready; on a GPU its decode steps are captured in bfloat16, which has all its operators."""
    model = load(
        LlmSettings(
            model=str(embedded_model()),
            device=device,
            dtype=dtype,
            tier="native",
            vision_target="unused:1",
            max_snapshots=0,
        )
    )
    warm_up(model)
    return model


def captured(model: LoadedModel) -> int:
    """Graphs of decode steps that the model has."""
    assert isinstance(model.runner, NativeRunner)
    steps: DecodeSteps | None = model.runner.decode_steps
    return steps.captured if steps is not None else 0


def greedy(model: LoadedModel, prompts: Prompts[dict[str, Any]]) -> list[list[tuple[int, float]]]:
    """Ids of the answer to each golden prompt, all running together, and each time the gap of the two best logits."""
    running: dict[int, Sequence] = {}
    found: dict[int, list[tuple[int, float]]] = {}
    for prompt in prompts:
        ids = tuple(prompt["ids"])
        params = SamplingParams(max_tokens=len(prompt["answer"]))
        sequence = Sequence(Request(prompt["task"], (PromptTokens(ids),), (), params), Prompt(ids, spans(prompt)))
        running[sequence.id], found[sequence.id] = sequence, []
        model.scheduler.add(sequence)
    while running:
        batch = model.scheduler.schedule()
        best = model.runner.run(batch).topk(2, -1)
        model.scheduler.finish(batch)
        for item, values, ids_of_best in zip(batch.sampled, best.values.tolist(), best.indices.tolist(), strict=True):
            sequence = item.sequence
            sequence.output_ids.append(ids_of_best[0])
            found[sequence.id].append((ids_of_best[0], values[0] - values[1]))
            if len(sequence.output_ids) == sequence.params.max_tokens:
                model.scheduler.remove(sequence)
                del running[sequence.id]
    return list(found.values())


def partings(prompts: Prompts[dict[str, Any]], gpu: LoadedModel, cpu: LoadedModel) -> list[Parting]:
    """Where greedy tokens of the two first differ, of each prompt."""
    parted = []
    for prompt, ours, expected in zip(prompts, greedy(gpu, prompts), greedy(cpu, prompts), strict=True):
        for place, ((token, _), (wanted, gap)) in enumerate(zip(ours, expected, strict=True)):
            if token != wanted:
                parted.append(Parting(prompt["task"], place, gap))
                break
    return parted


def golden_prompts() -> list[dict[str, Any]]:
    """The prompts that came with the embedded model, pictures and long ones among them."""
    prompts: list[dict[str, Any]] = golden()["prompts"]
    return prompts


TWO_LAYERS = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "indexed_attention"],
    "mlp_layer_types": ["sparse", "sparse"],
    "indexer_types": ["full", "full"],
}


def layer_errors(text_config: Mapping[str, Any] = TWO_LAYERS, device: str = "cuda") -> list[LayerError]:
    """One KDA and one sparse-attention layer of GLM-5.3-Flash's shapes, each with 288 experts, on the same weights.

    Ours runs on MXFP4 experts, upstream on the bfloat16 and float32 values that they stand for.
    """
    config = Glm5NextConfig(text_config=dict(text_config))
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        ours = load(
            LlmSettings(
                model=folder,
                load_format="dummy",
                device=device,
                dtype="bfloat16",
                tier="native",
                cache_tokens=4 * LAYER_TOKENS,
                max_running_sequences=1,
                experts_convert_tokens=0,
                prefill_chunk_tokens=0,
                prefix_cache=False,
            )
        )
    assert isinstance(ours.runner, NativeRunner)
    definition = ours.runner.model
    ids = torch.randint(0, ours.facts.vocab_size, (LAYER_TOKENS,), generator=torch.Generator().manual_seed(0))
    found = _our_outputs(ours, ids.tolist())
    tensors = _plain_tensors(definition)
    reference = _upstream_outputs(config, tensors, ids, torch.float32)
    narrow = _upstream_outputs(config, tensors, ids, torch.bfloat16)
    return [
        LayerError(name, _relative(found[name], expected), _relative(narrow[name], expected))
        for name, expected in reference.items()
    ]


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _hooked(language_model: Any, outputs: dict[str, torch.Tensor]) -> list[Any]:
    """Keeps the residual streams behind each layer, and the normed last hidden states."""

    def keep(name: str) -> Any:
        def hook(module: Any, inputs: Any, out: Any) -> None:
            value = out[0] if isinstance(out, tuple) else out
            outputs[name] = value.detach().float().cpu().reshape(LAYER_TOKENS, -1)

        return hook

    handles = [layer.register_forward_hook(keep(f"layer {n}")) for n, layer in enumerate(language_model.layers)]
    return [*handles, language_model.norm.register_forward_hook(keep("last hidden states"))]


def _our_outputs(model: LoadedModel, ids: list[int]) -> dict[str, torch.Tensor]:
    assert isinstance(model.runner, NativeRunner)
    outputs: dict[str, torch.Tensor] = {}
    handles = _hooked(model.runner.model.language_model, outputs)
    sequence = Sequence(
        Request("layers", (PromptTokens(tuple(ids)),), (), SamplingParams(max_tokens=1)), Prompt(tuple(ids))
    )
    model.scheduler.add(sequence)
    batch = model.scheduler.schedule()
    assert batch.tokens == LAYER_TOKENS
    model.runner.run(batch)
    for handle in handles:
        handle.remove()
    return outputs


def _plain_tensors(definition: Any) -> dict[str, torch.Tensor]:
    """Every parameter by upstream's name under the language model, packed experts as the bfloat16 they stand for."""
    tensors = {name: value.detach() for name, value in definition.language_model.state_dict().items()}
    for name, module in definition.language_model.named_modules():
        packed = getattr(module, "packed", None)
        if packed is not None:
            for kind, weight in (("gate_up_proj", packed.gate_up), ("down_proj", packed.down)):
                tensors[f"{name}.{kind}"] = torch.cat(
                    [
                        decode(codes, scales, torch.bfloat16)
                        for codes, scales in zip(weight.codes, weight.scales, strict=True)
                    ]
                ).view(len(weight.codes), weight.codes.shape[1], -1)
    return tensors


def _upstream_outputs(
    config: Any, tensors: dict[str, torch.Tensor], ids: torch.Tensor, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The same of the unmodified definition in `dtype`, filled with `tensors`."""
    with torch.device("meta"):
        model = Glm5NextForConditionalGeneration._from_config(config, dtype=dtype).eval()
    language_model = model.model.language_model
    kept = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    state = {
        name: value.to(torch.float32 if any(part in name for part in kept) or value.dtype == torch.float32 else dtype)
        for name, value in tensors.items()
    }
    language_model.load_state_dict(state, strict=True, assign=True)
    outputs: dict[str, torch.Tensor] = {}
    _hooked(language_model, outputs)
    with torch.inference_mode():
        language_model(input_ids=ids[None].to(language_model.device), use_cache=False)
    del model, language_model, state
    _free()
    return outputs


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> int:
    if not torch.cuda.is_available():
        print(f"nothing checked: torch {torch.__version__} sees no CUDA device", file=sys.stderr)
        return 1
    right = True
    cpu, prompts = embedded("cpu"), golden_prompts()
    for dtype in ("bfloat16", "float32"):
        gpu = embedded("cuda", dtype)
        parted = partings(prompts, gpu, cpu)
        print(f"{dtype}: {captured(gpu)} captured steps, {len(parted)} of {len(prompts)} answers part from the CPU's")
        for parting in parted:
            right &= parting.gap < LEAST_GAP
            print(f"  {parting.prompt}: token {parting.place}, the CPU's gap there is {parting.gap:.1e}")
        del gpu
    del cpu
    _free()
    for error in layer_errors():
        right &= error.times <= MOST_TIMES_UPSTREAM
        print(
            f"{error.name:<20} error {error.ours:.2e}, upstream's in bfloat16 {error.upstream:.2e}: {error.times:.2f}x"
        )
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
