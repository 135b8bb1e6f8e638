"""The first forwards of a model, before it is called ready."""

from __future__ import annotations

import torch

from llm_svc.build import LoadError
from llm_svc.core import Prompt, PromptTokens, Request, SamplingParams, Sequence
from llm_svc.loading import LoadedModel


def warm_up(model: LoadedModel) -> None:
    """Prefills a little more than a block, decodes, lets the runner prepare and decodes again; raises what goes wrong.

    What all that took is given back.
    """
    scheduler, facts = model.scheduler, model.facts
    length = min(scheduler.blocks.block_size + 1, scheduler.capacity_tokens - 3, facts.context_tokens - 3)
    ids = tuple(position % facts.vocab_size for position in range(max(1, length)))
    sequence = Sequence(Request("warm-up", (PromptTokens(ids),), (), SamplingParams(max_tokens=3)), Prompt(ids))
    scheduler.add(sequence)
    _generate(model, sequence, 2)
    model.runner.prepare()
    _generate(model, sequence, 3)
    scheduler.remove(sequence)
    model.runner.forget(sequence)
    scheduler.forget_prefixes()


def _generate(model: LoadedModel, sequence: Sequence, tokens: int) -> None:
    """Steps until the sequence has so many tokens."""
    while len(sequence.output_ids) < tokens:
        batch = model.scheduler.schedule()
        logits = model.runner.run(batch)
        model.scheduler.finish(batch)
        if not torch.isfinite(logits).all():
            raise LoadError("the first forward gave logits that are not finite: the weights are broken")
        sequence.output_ids += logits.argmax(dim=-1).tolist()
