"""From a bucket to an answer: a quantised checkpoint, streamed, checked and served by all three services."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoTokenizer, Glm5NextForConditionalGeneration, Glm5NextImageProcessorPil

from day0.quantize import quantize_checkpoint
from day0_kernels.mxfp4 import decode
from llm_svc.build import LoadError
from llm_svc.service import SERVICE_NAME, LanguageModelService
from llm_svc.settings import LlmSettings
from protos.common.v1 import common_pb2
from protos.llm.v1 import llm_pb2
from protos.router.v1 import router_pb2
from svc_common.digests import make_manifest
from svc_common.manifest import write_manifest
from svc_common.object_store import ObjectStore
from tests.llm_svc.conftest import Sample, Upstream, picture
from tests.llm_svc.packed import read, write
from tests.llm_svc.test_parity import request_of
from tests.loopback import ANY_PORT, Answer, LlmOnLoopback, LoopThread, completion, ids_part
from tests.s3_double import BUCKET, moto

GOOD, BAD = f"s3://{BUCKET}/good", f"s3://{BUCKET}/bad"


@pytest.fixture(scope="module")
def bucket() -> Iterator[None]:
    """A moto server, reached by the variables that every S3 client knows."""
    with moto() as endpoint, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", endpoint)
        patch.setenv("AWS_ALLOW_HTTP", "true")
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_REGION", "us-east-1")
        yield


@pytest.fixture(scope="module")
def quantised(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with MXFP4 experts and a manifest."""
    folder = tmp_path_factory.mktemp("bucket") / "quantised"
    quantize_checkpoint(tiny_checkpoint, folder)
    store = ObjectStore(str(folder))
    write_manifest(store, make_manifest(store))
    return folder


@pytest.fixture(scope="module")
def reference(quantised: Path, tmp_path_factory: pytest.TempPathFactory) -> Upstream:
    """Unmodified upstream on the same weights, decoded beforehand."""
    tensors = read(quantised)
    for name in [name for name in tensors if name.endswith(".weight_packed")]:
        stem = name.removesuffix("_packed")
        tensors[stem] = decode(tensors.pop(name), tensors.pop(f"{stem}_scale"))
    folder = write(quantised, tmp_path_factory.mktemp("decoded") / "decoded", tensors, None)
    return Upstream(
        model=Glm5NextForConditionalGeneration.from_pretrained(folder).eval(),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        processor=Glm5NextImageProcessorPil.from_pretrained(folder),
    )


def upload(folder: Path, uri: str, *, flip: tuple[str, int] | None = None) -> None:
    store = ObjectStore(uri)
    for file in sorted(folder.iterdir()):
        content = bytearray(file.read_bytes())
        if flip is not None and file.name == flip[0]:
            content[flip[1]] ^= 1
        store.write(file.name, bytes(content))


def test_tokens_through_all_three_services_equal_upstream(bucket: None, quantised: Path, reference: Upstream) -> None:
    upload(quantised, GOOD)
    samples = [
        Sample("text", (list(range(40, 120)),)),
        Sample("image", ([5, 6, 7], picture(1), [8, 9])),
        Sample("two images", (picture(4), [10, 11], picture(2), list(range(200, 300)))),
    ]
    settings = {"require_manifest": True, "load_budget_bytes": 1 << 20}
    with LlmOnLoopback(GOOD, vision=settings, **settings) as service:

        async def ask_all() -> list[Answer]:
            stub = await service.start_router()
            answers = []
            for sample in samples:
                direct = request_of(sample)
                request = router_pb2.GenerateRequest(completion=direct.completion, sampling=direct.sampling)
                answer = Answer()
                async for event in stub.Generate(request):
                    answer.add(event)
                answers.append(answer)
            return answers

        answers = service.run(ask_all())
        info = service.llm.servicer.served.info
        assert service.metric("day0_weight_load_bytes") == service.metric("day0_weight_load_expected_bytes") > 0
    assert (info.tier, info.modalities) == ("native", ["text", "image"])
    for sample, answer in zip(samples, answers, strict=True):
        assert answer.ids[0] == reference.generate(sample), sample.name


def test_the_workspace_is_told_by_model_info_and_metrics(quantised: Path) -> None:
    settings = {"experts_convert_tokens": 1, "experts_workspace_bytes": 1 << 20}
    with LlmOnLoopback(quantised, images=False, **settings) as service:

        async def ask() -> common_pb2.ModelInfo:
            return (await service.stub.GetModelInfo(llm_pb2.GetModelInfoRequest())).info

        assert service.ask(completion(ids_part([5, 6, 7]), max_tokens=2, ignore_eos=True)).ids
        info = service.run(ask())
        assert 0 < info.workspace_high_water_bytes <= info.workspace_bytes
        assert service.metric("day0_workspace_bytes") == info.workspace_bytes
        assert service.metric("day0_workspace_high_water_bytes") == info.workspace_high_water_bytes
    assert (info.experts_residency, info.experts_convert_tokens) == ("device", 1)


@pytest.mark.parametrize("place", [-1, 4000])
def test_one_wrong_byte_is_never_ready(bucket: None, quantised: Path, place: int) -> None:
    """In the last tensor of a shard, and in an earlier one."""
    shard = sorted(quantised.glob("*.safetensors"))[0].name
    upload(quantised, BAD, flip=(shard, place))
    service = LanguageModelService(LlmSettings(model=BAD, block_size=16, **ANY_PORT))
    thread = LoopThread()

    async def load() -> None:
        await service.start()
        try:
            await service.load()
        finally:
            assert service.servicer.served is None
            assert service.health.status(SERVICE_NAME) != 1, "NOT_SERVING while nothing is loaded"
            await service.stop()

    with pytest.raises(LoadError, match=rf"{shard}: (tensor '.*': )?wrong bytes"):
        thread.run(load())
    assert 'startup_stage{stage="failed"} 1.0' in service.metrics.text()
    thread.close()
