"""Steps a loaded model by hand, greedily, and keeps every logit."""

from __future__ import annotations

import torch

from llm_svc.core import Prompt, PromptTokens, Request, SamplingParams, Sequence
from llm_svc.loading import LoadedModel


def step_all(model: LoadedModel, prompts: list[list[int]], new_tokens: int | list[int]) -> list[torch.Tensor]:
    """Logits float32 [new_tokens, vocab_size] of each prompt, all running together; the model is as before."""
    counts = [new_tokens] * len(prompts) if isinstance(new_tokens, int) else new_tokens
    sequences = [
        Sequence(
            Request(str(number), (PromptTokens(tuple(ids)),), (), SamplingParams(max_tokens=count)), Prompt(tuple(ids))
        )
        for number, (ids, count) in enumerate(zip(prompts, counts, strict=True))
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
            # A runner may write the next step's logits to the same place.
            rows[sequence.id].append(row.clone())
            sequence.output_ids.append(int(row.argmax()))
            if len(sequence.output_ids) == sequence.params.max_tokens:
                model.scheduler.remove(sequence)
                running -= 1
    model.scheduler.forget_prefixes()
    return [torch.stack(rows[sequence.id]) for sequence in sequences]
