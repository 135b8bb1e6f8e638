"""The unmodified upstream model of the tiny checkpoint, what it answers, and prompts built from its tokenizer."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw

from llm_svc.prompt import PromptBuilder


def picture(seed: int, width: int = 120, height: int = 90) -> bytes:
    """A PNG whose content depends on `seed`."""
    image = Image.new("RGB", (width, height), (40 * seed % 256, 90, seed))
    draw = ImageDraw.Draw(image)
    draw.ellipse((10, 10, 30 + 10 * seed % 80, 60), fill=(250, 250 - 40 * seed % 250, 20))
    draw.rectangle((60, 20 + 3 * seed % 50, 110, 80), fill=(10, 200, 30 * seed % 256))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


@dataclass(frozen=True)
class Sample:
    """A prompt both sides can be given: runs of ids and pictures in order."""

    name: str
    parts: tuple[list[int] | bytes, ...]


@dataclass
class Upstream:
    """`transformers` alone: the definition, its own processor, its own `generate`."""

    model: Any
    tokenizer: Any
    processor: Any
    answers: dict[str, list[int]] = field(default_factory=dict)

    @property
    def config(self) -> Any:
        return self.model.config

    def inputs(self, sample: Sample) -> dict[str, torch.Tensor]:
        """input_ids [1, S] with placeholders, and the pixels when there are any."""
        ids: list[int] = []
        images = []
        for part in sample.parts:
            if isinstance(part, bytes):
                images.append(Image.open(io.BytesIO(part)).convert("RGB"))
                grid = self.processor(images=images[-1:], return_tensors="pt")["image_grid_thw"]
                count = int(grid.prod()) // self.processor.merge_size**2
                start, end = self.config.image_start_token_id, self.config.image_end_token_id
                ids += [start, *[self.config.image_token_id] * count, end]
            else:
                ids += part
        inputs = {"input_ids": torch.tensor([ids])}
        if images:
            inputs |= dict(self.processor(images=images, return_tensors="pt"))
        return inputs

    def generate(self, sample: Sample, new_tokens: int = 64) -> list[int]:
        """Greedy ids, end tokens ignored; remembered by the sample's name."""
        if sample.name not in self.answers:
            inputs = self.inputs(sample)
            with torch.inference_mode():
                out = self.model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, eos_token_id=None)
            self.answers[sample.name] = out[0, inputs["input_ids"].shape[1] :].tolist()
        return self.answers[sample.name]


@pytest.fixture(scope="session")
def upstream(tiny_checkpoint: Path) -> Upstream:
    from transformers import AutoTokenizer, Glm5NextForConditionalGeneration, Glm5NextImageProcessorPil

    torch.set_num_threads(1)
    model = Glm5NextForConditionalGeneration.from_pretrained(tiny_checkpoint).eval()
    assert all(type(module).__module__.startswith(("transformers.", "torch.")) for module in model.modules())
    return Upstream(
        model=model,
        tokenizer=AutoTokenizer.from_pretrained(tiny_checkpoint),
        processor=Glm5NextImageProcessorPil.from_pretrained(tiny_checkpoint),
    )


@pytest.fixture(scope="session")
def samples(upstream: Upstream) -> list[Sample]:
    """The twenty prompts of the parity tests. `k` is index_topk (64), a block holds 16 tokens, a pool 4."""
    generator = torch.Generator().manual_seed(7)
    plain = len(upstream.tokenizer) - len(upstream.tokenizer.all_special_ids) - 20

    def ids(count: int) -> list[int]:
        return torch.randint(0, plain, (count,), generator=generator).tolist()

    def chat(text: str) -> list[int]:
        return upstream.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )

    topk = upstream.config.text_config.index_topk
    assert (topk, upstream.config.text_config.index_kpool) == (64, 4)
    red, blue = picture(1), picture(4, 70, 140)
    lengths = [1, 15, 16, 17, topk - 1, topk, topk + 1, topk + 4, 300, 700]
    return [
        *(Sample(f"text-{length}", (ids(length),)) for length in lengths),
        Sample("chat-short", (chat("Hello there, what can you do?"),)),
        Sample("chat-lines", (chat("1. one\n2. two\n\nWhich is larger? 世界"),)),
        Sample("chat-long", (chat("The river runs past the old mill. " * 20 + "Where does it run?"),)),
        Sample("one-image", (ids(9), red, ids(7))),
        Sample("image-first", (red, ids(5))),
        Sample("image-last", (ids(5), blue)),
        Sample("two-images", (ids(4), red, ids(3), blue, ids(6))),
        Sample("two-images-swapped", (ids(4), blue, ids(3), red, ids(6))),
        Sample("same-image-twice", (red, ids(2), red, ids(2))),
        Sample("image-far-away", (ids(20), red, ids(400))),
    ]


@pytest.fixture(scope="session")
def tokenizer(tiny_checkpoint: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_checkpoint)


@pytest.fixture(scope="module")
def builder(tiny_checkpoint: Path) -> Iterator[PromptBuilder]:
    builder = PromptBuilder.from_checkpoint(tiny_checkpoint)
    yield builder
    builder.close()


@pytest.fixture(scope="session")
def packed_checkpoint(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny checkpoint with its routed experts in MXFP4."""
    from tests.llm_svc.packed import read, write
    from tests.llm_svc.test_packed_experts import compressed_tensors

    tensors = read(tiny_checkpoint)
    quantization = compressed_tensors(tensors, {})
    return write(tiny_checkpoint, tmp_path_factory.mktemp("packed") / "tiny", tensors, quantization)
