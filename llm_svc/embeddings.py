"""Token embeddings of a batch with visual tokens in the places of their placeholders."""

from __future__ import annotations

import torch
from torch import nn

from llm_svc.core import Batch


def batch_embeddings(embed_tokens: nn.Module, batch: Batch, device: torch.device) -> torch.Tensor:
    """Embeddings [T, hidden] of the batch's tokens in order; every visual row that falls into it has arrived."""
    ids: list[int] = []
    for item in batch.items:
        ids += item.sequence.token_ids(item.start, item.start + item.count)
    rows: torch.Tensor = embed_tokens(torch.tensor(ids, device=device))
    offset = 0
    for item in batch.items:
        end = item.start + item.count
        for span in item.sequence.prompt.images:
            first, last = max(span.start, item.start), min(span.end, end)
            if first >= last:
                continue
            assert span.visual.rows is not None, "a placeholder was scheduled before its visual tokens arrived"
            visual = torch.from_numpy(span.visual.rows[first - span.start : last - span.start])
            rows[offset + first - item.start : offset + last - item.start] = visual.to(rows)
        offset += item.count
    return rows
