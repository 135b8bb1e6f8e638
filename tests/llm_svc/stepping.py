"""Steps a loaded model by hand, greedily, and keeps every logit."""

from __future__ import annotations

import torch

from llm_svc.core import Prompt, PromptTokens, Request, SamplingParams, Sequence
from llm_svc.loading import LoadedModel


def step_all(model: LoadedModel, prompts: list[list[int]], new_tokens: int) -> list[torch.Tensor]:
    """Logits float32 [new_tokens, vocab_size] of each prompt, all running together; the model is as before."""
    params = SamplingParams(max_tokens=new_tokens)
    sequences = [
        Sequence(Request(str(number), (PromptTokens(tuple(ids)),), (), params), Prompt(tuple(ids)))
        for number, ids in enumerate(prompts)
    ]
    rows: dict[int, list[torch.Tensor]] = {sequence.id: [] for sequence in sequences}
    for sequence in sequences:
        model.scheduler.add(sequence)
    running = len(sequences)
    while running:
        batch = model.scheduler.schedule()
        logits = model.runner.run(batch)
        model.scheduler.finish(batch)
        for item, row in zip(batch.sampled, logits, strict=True):
            sequence = item.sequence
            rows[sequence.id].append(row)
            sequence.output_ids.append(int(row.argmax()))
            if len(sequence.output_ids) == new_tokens:
                model.scheduler.remove(sequence)
                running -= 1
    model.scheduler.forget_prefixes()
    return [torch.stack(rows[sequence.id]) for sequence in sequences]
