"""What the engine asks of an execution tier; `native_runner.py` and `upstream_runner.py` are the two there are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from day0_kernels.workspace import Workspace
from llm_svc.core import Batch, Sequence
from llm_svc.expert_residency import ExpertCounts


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the rest of the service needs to know of a loaded model.

    `context_tokens` bounds prompt and answer together; `visual_hidden` is the width of a visual token, 0 where images
    cannot be used; `image_token_id` is the placeholder's id, None where there is none; `operator_backends` names the
    backend of each operator (empty in the upstream tier). `experts_residency` is "device" or "host";
    `experts_convert_tokens` is the tokens of a forward from which MXFP4 experts are converted to FP8, 0 for never.
    """

    architecture: str
    tier: str
    context_tokens: int
    vocab_size: int
    dtype: str
    visual_hidden: int
    image_token_id: int | None
    operator_backends: dict[str, str]
    cache_bytes: int
    experts_residency: str = "device"
    experts_convert_tokens: int = 0


class Runner(Protocol):
    """Runs the forward of a batch. `workspace` is the arena of its scratch, None where it needs none."""

    facts: ModelFacts
    workspace: Workspace | None
    expert_counts: ExpertCounts

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits float32 [number of `batch.sampled`, vocab_size], in their order."""

    def prepare(self) -> None:
        """Does once, after the first forwards, what later steps rely on; raises what goes wrong."""

    def forget(self, sequence: Sequence) -> None:
        """Told when a sequence is over, so that what is held for it can go."""
