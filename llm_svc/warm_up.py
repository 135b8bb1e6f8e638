"""The first forwards of a model, before it is called ready."""

from __future__ import annotations

import torch

from llm_svc.build import LoadError
from llm_svc.core import Prompt, PromptTokens, Request, SamplingParams, Sequence
from llm_svc.loading import LoadedModel


def warm_up(model: LoadedModel) -> None:
    """Prefills a little more than a block and decodes once, then gives back all that took; raises what goes wrong."""
    scheduler, facts = model.scheduler, model.facts
    length = min(scheduler.blocks.block_size + 1, scheduler.capacity_tokens - 2, facts.context_tokens - 2)
    ids = tuple(position % facts.vocab_size for position in range(max(1, length)))
    sequence = Sequence(Request("warm-up", (PromptTokens(ids),), (), SamplingParams(max_tokens=2)), Prompt(ids))
    scheduler.add(sequence)
    while len(sequence.output_ids) < 2:
        batch = scheduler.schedule()
        logits = model.runner.run(batch)
        scheduler.finish(batch)
        if not torch.isfinite(logits).all():
            raise LoadError("the first forward gave logits that are not finite: the weights are broken")
        sequence.output_ids += logits.argmax(dim=-1).tolist()
    scheduler.remove(sequence)
    model.runner.forget(sequence)
    scheduler.forget_prefixes()
