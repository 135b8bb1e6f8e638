"""Runs held-out prompts through a checkpoint in this process and counts the experts they take; answers nothing."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO

import numpy as np
from PIL import Image

from day0.expert_activation.counts import ActivationCounts, Load
from day0.heldout import HeldOutSet
from llm_svc.core import (
    ImageSpan,
    Prompt,
    PromptImage,
    PromptTokens,
    Request,
    SamplingParams,
    VisualTokens,
)
from llm_svc.core import Sequence as RunningSequence
from llm_svc.loading import LoadedModel, load_model
from llm_svc.prompt import PromptBuilder
from llm_svc.prompt_parts import ChatMessage, ImagePart, TextPart
from llm_svc.service import open_source
from llm_svc.settings import LlmSettings
from llm_svc.wire import ROLES
from protos.common.v1 import common_pb2
from svc_common.checkpoint_source import CheckpointSource
from vision_svc.encoder import EncodeError, Encoder
from vision_svc.processor import PatchProcessor


@dataclass(frozen=True, slots=True)
class Activation:
    """Loads of all layers, from `prompts` prompts through the named tier."""

    model: str
    tier: str
    prompts: int
    loads: tuple[Load, ...]


def measure_activation(
    settings: LlmSettings, held_out: HeldOutSet, told: Callable[[int], None] = lambda done: None
) -> Activation:
    """Prefills every prompt alone, so that each of its tokens is counted once. `told` is called after each.

    Raises LoadError, CheckpointError and ActivationError.
    """
    # Prefix hits would hide tokens from the gates.
    settings = settings.model_copy(update={"prefix_cache": False, "max_snapshots": 0})
    source = open_source(settings)
    try:
        model = load_model(settings, source)
        prompts = PromptBuilder.from_checkpoint(source.folder)
        pictures = _Pictures(source)
        counts = ActivationCounts()
        try:
            with counts.watching():
                for number, example in enumerate(held_out.examples, 1):
                    # A model that takes no pictures refuses the prompt before the id is looked at.
                    image_token_id = model.facts.image_token_id or 0
                    _prefill(model, _prompt(prompts, pictures, example.chat, image_token_id), counts)
                    told(number)
        finally:
            prompts.close()
        return Activation(source.name, model.facts.tier, len(held_out.examples), tuple(counts.loads()))
    finally:
        source.close()


class _Pictures:
    """Visual tokens through the vision service's own processor and tower, built when the first picture comes."""

    def __init__(self, source: CheckpointSource) -> None:
        self._source = source
        self._parts: tuple[Encoder, PatchProcessor] | None = None

    def encode(self, data: bytes) -> VisualTokens:
        if self._parts is None:
            encoder = Encoder(self._source, dtype="float32", batch_invariant=True)
            self._parts = encoder, PatchProcessor(self._source.folder)
        encoder, processor = self._parts
        (encoded,) = encoder.encode([processor(Image.open(BytesIO(data)).convert("RGB"))])
        if isinstance(encoded, EncodeError):
            raise encoded
        rows = np.frombuffer(encoded.data, dtype=np.float32).reshape(encoded.tokens, encoded.hidden).copy()
        return VisualTokens(hashlib.sha256(data).digest(), encoded.tokens, rows)


def _prompt(prompts: PromptBuilder, pictures: _Pictures, chat: common_pb2.Chat, image_token_id: int) -> RunningSequence:
    """A conversation of the held-out set as a sequence that has everything it needs."""
    images: list[VisualTokens] = []
    messages = []
    for message in chat.messages:
        parts: list[TextPart | ImagePart] = []
        for part in message.parts:
            if part.WhichOneof("content") == "text":
                parts.append(TextPart(part.text))
            else:
                images.append(pictures.encode(part.image.data))
                parts.append(ImagePart())
        messages.append(ChatMessage(ROLES[message.role], tuple(parts)))
    segments = prompts.build_chat(messages)
    ids: list[int] = []
    spans: list[ImageSpan] = []
    for segment in segments:
        if isinstance(segment, PromptTokens):
            ids += segment.ids
            continue
        assert isinstance(segment, PromptImage)
        visual = images[segment.index]
        spans.append(ImageSpan(len(ids), visual))
        ids += [image_token_id] * visual.count
    request = Request("experts", segments, (), SamplingParams(max_tokens=1))
    return RunningSequence(request, Prompt(tuple(ids), tuple(spans)))


def _prefill(model: LoadedModel, sequence: RunningSequence, counts: ActivationCounts) -> None:
    visual = _is_visual(len(sequence.prompt.ids), sequence.prompt.images)
    model.scheduler.add(sequence)
    while sequence.computed < len(sequence.prompt.ids):
        batch = model.scheduler.schedule()
        counts.expect([flag for item in batch.items for flag in visual[item.start : item.start + item.count]])
        model.runner.run(batch)
        model.scheduler.finish(batch)
    model.runner.forget(sequence)
    model.scheduler.remove(sequence)


def _is_visual(length: int, spans: Sequence[ImageSpan]) -> list[bool]:
    visual = [False] * length
    for span in spans:
        visual[span.start : span.end] = [True] * (span.end - span.start)
    return visual
