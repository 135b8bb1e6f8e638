"""The ways in which the same prompts are computed, and whether each gives the answers of the first; prints nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from day0.align.alignment import TAPS
from day0.align.reference import AlignError
from day0.align.tap import Verdict, accumulated, compare_values, tolerance
from day0.parity.in_process import Answer, answer
from day0.parity.prompts import Prompts, make_prompts
from llm_svc.build import LoadError
from llm_svc.cache.block_pool import BlockPool
from llm_svc.cache.state_slots import Snapshots, StateSlots
from llm_svc.core import Prompt, PromptTokens, Request, SamplingParams, Sequence
from llm_svc.detokenizer import Detokenizer, spellings_of
from llm_svc.loading import LoadedModel, load_model
from llm_svc.scheduler import Scheduler, SchedulerLimits
from llm_svc.service import open_source
from llm_svc.settings import LlmSettings

BLOCK_TOKENS = 16
NEW_TOKENS = 8
_SLOTS = 8
_SNAPSHOTS = 256


@dataclass(frozen=True, slots=True)
class WayResult:
    """One way against the whole prefill.

    `part` is what a difference would be the fault of. `error` is the largest difference of a logit over the largest
    logit. `proof` says what shows that the way was taken; where it was not, the verdict is UNSEEN.
    """

    way: str
    part: str
    verdict: Verdict
    error: float
    tolerance: float
    proof: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class Taken:
    """What a way gave, before it is judged; `happened` is False where the prompts did not make it take place."""

    part: str
    answers: dict[str, Answer]
    proof: str
    happened: bool = True
    shown: int | None = None


@dataclass(frozen=True, slots=True)
class Parity:
    """What `parity` found; `results` in the order they ran."""

    model: str
    tier: str
    dtype: str
    prompts: int
    tokens: int
    results: tuple[WayResult, ...]

    @property
    def holds(self) -> bool:
        """Whether every way gives the same answers."""
        return all(result.verdict.passes for result in self.results)


class Workbench:
    """One loaded checkpoint, its prompts, and schedulers of any size over the same caches."""

    def __init__(self, folder: Path, dtype: str, device: str) -> None:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        if config.model_type not in TAPS:
            raise AlignError(f"MODEL: parity knows {', '.join(sorted(TAPS))}, and the model is {config.model_type}")
        self.folder, self.config = folder, config
        self.prompts: Prompts = make_prompts(folder, config, BLOCK_TOKENS)
        lengths = [len(prompt.ids) + NEW_TOKENS for prompt in self.prompts.by_name().values()]
        self.longest = -(-max(lengths) // BLOCK_TOKENS) * BLOCK_TOKENS
        self.total_blocks = sum(-(-length // BLOCK_TOKENS) for length in lengths) + _SLOTS
        settings = LlmSettings(
            model=str(folder),
            tier="native",
            dtype=dtype,
            device=device,
            block_size=BLOCK_TOKENS,
            cache_tokens=self.total_blocks * BLOCK_TOKENS,
            max_running_sequences=_SLOTS,
            max_snapshots=_SNAPSHOTS,
            vision_target="unused:1",
        )
        with closing(open_source(settings)) as source:
            try:
                self.model: LoadedModel = load_model(settings, source)
            except LoadError as error:
                raise AlignError(f"MODEL: {error}") from error
        spellings = spellings_of(transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True))
        self.make_detokenizer: Callable[[], Detokenizer] = lambda: Detokenizer(spellings)
        text = config.get_text_config()
        taps = TAPS[config.model_type].taps
        per_layer = (tap for layer in range(text.num_hidden_layers) for tap in taps(text, layer))
        kind: torch.dtype = getattr(torch, dtype)
        self.allowed = accumulated(tolerance(tap.terms(text, self.longest), kind) for tap in per_layer)

    def scheduler(self, *, chunk: int = 0, prefixes: bool = False, blocks: int = 0) -> Scheduler:
        """`chunk` 0 is the whole prompt; `blocks` 0 is all there are."""
        limits = SchedulerLimits(
            max_batch_tokens=self.total_blocks * BLOCK_TOKENS + _SLOTS,
            prefill_chunk_tokens=chunk,
            max_running_sequences=_SLOTS,
            prefix_cache=prefixes,
        )
        pool = BlockPool(blocks or self.total_blocks, BLOCK_TOKENS)
        return Scheduler(limits, pool, StateSlots(_SLOTS), Snapshots(_SNAPSHOTS if prefixes else 0))

    def ask(self, scheduler: Scheduler, *groups: dict[str, Prompt]) -> dict[str, Answer]:
        """See `in_process.answer`."""
        return answer(self.model.runner, scheduler, self.make_detokenizer, groups, NEW_TOKENS)


def measure_parity(
    bench: Workbench, told: Callable[[str], None] = lambda what: None, ways: Iterable[str] = ()
) -> Parity:
    """Every way in turn, or those named in `WAYS`; `told` is called before each."""
    prompts = bench.prompts.by_name()
    told("whole prefill, one at a time")
    whole = bench.ask(bench.scheduler(), *({name: prompt} for name, prompt in prompts.items()))
    results: list[WayResult] = []
    for name in ways or WAYS:
        told(name)
        taken = WAYS[name](bench, whole)
        if taken is not None:
            results.append(_judge(name, taken, whole, bench.allowed))
    facts = bench.model.facts
    tokens = sum(len(prompt.ids) for prompt in prompts.values())
    return Parity(bench.folder.name, facts.tier, facts.dtype, len(prompts), tokens, tuple(results))


def _in_chunks(chunk: int) -> Callable[[Workbench, dict[str, Answer]], Taken]:
    def take(bench: Workbench, whole: dict[str, Answer]) -> Taken:
        alone = ({name: prompt} for name, prompt in bench.prompts.by_name().items())
        found = bench.ask(bench.scheduler(chunk=chunk), *alone)
        return Taken("states and caches carried from chunk to chunk", found, f"{chunk}-token chunks")

    return take


def _prefix_hit(bench: Workbench, whole: dict[str, Answer]) -> Taken:
    prompts = bench.prompts.by_name()
    alone = [{name: prompt} for name, prompt in prompts.items()]
    found = bench.ask(bench.scheduler(prefixes=True), *alone, *alone)
    hits = [got.cached_tokens for name, got in found.items() if len(prompts[name].ids) > BLOCK_TOKENS]
    return Taken("prefix cache", found, f"{sum(hits)} tokens from the cache", min(hits) > 0)


def _restored(bench: Workbench, whole: dict[str, Answer]) -> Taken:
    scheduler = bench.scheduler(chunk=BLOCK_TOKENS, prefixes=True)
    pair = bench.prompts
    found = bench.ask(scheduler, {"beginning": pair.beginning}, {"continued": pair.continued})
    cached = found["continued"].cached_tokens
    return Taken("state snapshots", found, f"{cached} tokens from a snapshot", cached > 0)


def _another_picture(bench: Workbench, whole: dict[str, Answer]) -> Taken | None:
    pair = bench.prompts
    if pair.picture is None or pair.other_picture is None:
        return None
    scheduler = bench.scheduler(chunk=BLOCK_TOKENS, prefixes=True)
    found = bench.ask(scheduler, {"picture": pair.picture}, {"other picture": pair.other_picture})
    differ = bool(whole["picture"].rows[0].ne(whole["other picture"].rows[0]).any())
    proof = "the pictures' logits differ" if differ else "the model gives both pictures the same logits"
    return Taken("prefix key (image digest)", found, proof, differ)


def _preempted(bench: Workbench, whole: dict[str, Answer]) -> Taken:
    scheduler = bench.scheduler(chunk=3 * BLOCK_TOKENS, blocks=bench.longest // BLOCK_TOKENS + 2)
    found = bench.ask(scheduler, bench.prompts.by_name())
    count = scheduler.counters.preemptions
    return Taken("starting over after preemption", found, f"{count} preemptions", count > 0)


def _neighbours(bench: Workbench, whole: dict[str, Answer]) -> Taken:
    prompts = bench.prompts.by_name()
    found = bench.ask(bench.scheduler(chunk=2 * BLOCK_TOKENS), prompts)
    return Taken("independence of neighbours", found, f"{len(prompts)} prompts together")


def _stepped(bench: Workbench, whole: dict[str, Answer]) -> Taken:
    prompt = bench.prompts.beginning
    found = {"beginning": Answer([_token_by_token(bench, prompt)])}
    return Taken("decode operators against prefill operators", found, f"{len(prompt.ids) - 1} decode steps", shown=1)


WAYS: dict[str, Callable[[Workbench, dict[str, Answer]], Taken | None]] = {
    f"chunks of {BLOCK_TOKENS} tokens": _in_chunks(BLOCK_TOKENS),
    f"chunks of {3 * BLOCK_TOKENS + 5} tokens": _in_chunks(3 * BLOCK_TOKENS + 5),
    "prefix hit": _prefix_hit,
    "state restored inside another prompt": _restored,
    "another picture at the same ids": _another_picture,
    "preempted": _preempted,
    "batch of neighbours": _neighbours,
    "token by token": _stepped,
}


def _judge(way: str, taken: Taken, whole: dict[str, Answer], allowed: float) -> WayResult:
    """The worst prompt counts. Logits are compared up to the first token that differs: then the pasts differ."""
    if not taken.happened:
        return WayResult(way, taken.part, Verdict.UNSEEN, 0.0, allowed, taken.proof, "this way was not taken")
    worst, error, note = Verdict.EQUAL, 0.0, ""
    order = list(Verdict)
    for name, got in taken.answers.items():
        verdict, off, why = _compare(whole[name], got, allowed, taken.shown)
        if (order.index(verdict), off) > (order.index(worst), error):
            worst, error, note = verdict, off, f"{name}: {why}" if why else name
    return WayResult(way, taken.part, worst, error, allowed, taken.proof, note)


def _compare(whole: Answer, found: Answer, allowed: float, shown: int | None) -> tuple[Verdict, float, str]:
    """`shown` is how many tokens a way shows on purpose, None where it shows them all."""
    same = next((n for n, (a, b) in enumerate(zip(whole.ids, found.ids, strict=False)) if a != b), None)
    rows = len(found.rows) if same is None else same + 1
    verdict, error, why = compare_values(found.logits[:rows], whole.logits[:rows], allowed)
    if same is None and len(found.rows) not in (len(whole.rows), shown):
        return Verdict.DIVERGES, error, f"{len(found.rows)} tokens of {len(whole.rows)} came"
    if same is None:
        return verdict, error, why
    # Within the tolerance two tokens were equally likely.
    return (Verdict.TIE if verdict.passes else verdict), error, f"token {same} of the answer differs"


def _token_by_token(bench: Workbench, prompt: Prompt) -> Tensor:
    """Logits [vocab_size] after the prompt when each of its tokens but the first is a decode step."""
    request = Request("steps", (PromptTokens(prompt.ids[:1]),), (), SamplingParams(max_tokens=len(prompt.ids)))
    sequence = Sequence(request, Prompt(prompt.ids[:1]))
    scheduler = bench.scheduler()
    scheduler.add(sequence)
    logits: Any = None
    for token in (*prompt.ids[1:], None):
        batch = scheduler.schedule()
        logits = bench.model.runner.run(batch)
        scheduler.finish(batch)
        if token is not None:
            sequence.output_ids.append(token)
    bench.model.runner.forget(sequence)
    scheduler.remove(sequence)
    row: Tensor = logits[0].clone()
    return row
