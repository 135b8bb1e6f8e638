"""Upstream's own `generate`, one request at a time, as the thing to compare with; knows no service."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from day0.bench.dataset import Sample


@dataclass(frozen=True, slots=True)
class UpstreamRun:
    """Greedy token ids of each sample, in order, and the seconds all took together."""

    token_ids: list[list[int]]
    duration_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens over the whole time."""
        return sum(map(len, self.token_ids)) / self.duration_seconds


class Upstream:
    """The unmodified definition, loaded by transformers in float32 on the CPU."""

    def __init__(self, model: Path, *, threads: int = 0) -> None:
        """`threads` of one matrix product; 0 leaves torch's choice, and both are of the whole process."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        from day0.tiny import quiet

        if threads:
            torch.set_num_threads(threads)
        config = AutoConfig.from_pretrained(model, local_files_only=True)
        auto: Any = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        with quiet():
            self._model = auto.from_pretrained(model, local_files_only=True, dtype=torch.float32).eval()

    def generate(self, samples: Sequence[Sample], on_end: Callable[[], None] = lambda: None) -> UpstreamRun:
        """Exactly `output_len` greedy tokens for each sample, end tokens ignored; samples have no images."""
        import torch

        answers = []
        start = time.monotonic()
        for sample in samples:
            assert not sample.images, "text only"
            ids = torch.tensor([sample.token_ids])
            with torch.inference_mode():
                out = self._model.generate(
                    input_ids=ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=sample.output_len,
                    do_sample=False,
                    eos_token_id=None,
                )
            answers.append(out[0, ids.shape[1] :].tolist())
            on_end()
        return UpstreamRun(answers, time.monotonic() - start)
