"""Losses and running accuracies by task; it knows no model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TaskLosses:
    """loss: a float32 scalar, the mean over the tasks present of their mean cross-entropy. The others are float32
    `[tasks]` sums over answer tokens: cross-entropy in nats, tokens, and tokens predicted right."""

    loss: Tensor
    nats: Tensor
    tokens: Tensor
    right: Tensor


def task_losses(logits: Tensor, ids: Tensor, task: Tensor, tasks: int) -> TaskLosses:
    """Of logits `[B, L, V]`, ids int32 and task int8 `[B, L]`: the position before an answer token predicts it."""
    # The row's last position predicts nothing: it belongs to no task.
    target = F.pad(ids[:, 1:], (0, 1)).flatten().to(torch.int64)
    owner = F.pad(task[:, 1:], (0, 1), value=-1).flatten()
    scores = logits.flatten(0, 1).float()
    nats = F.cross_entropy(scores, target, reduction="none")
    belongs = owner[:, None] == torch.arange(tasks, device=task.device)
    sums = (nats[:, None] * belongs).sum(0)
    tokens = belongs.sum(0, dtype=torch.float32)
    with torch.no_grad():
        hits = (scores.argmax(-1) == target)[:, None] & belongs
    loss = (sums / tokens.clamp_min(1)).sum() / (tokens > 0).sum().clamp_min(1)
    return TaskLosses(loss, sums.detach(), tokens, hits.sum(0, dtype=torch.float32))
