"""The engine's thread: schedules, runs, samples, and hands tokens to their streams."""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as Rows
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from llm_svc.core import (
    Batch,
    FinishReason,
    Prompt,
    Request,
    SampledToken,
    SamplingParams,
    Sequence,
    SequenceStatus,
)
from llm_svc.detokenizer import Detokenizer
from llm_svc.model_runner import Runner
from llm_svc.observe import EngineObserver
from llm_svc.output import FailureEvent, FinishEvent, OutputChannel, TokenEvent, UsageEvent
from llm_svc.sampler import NonFiniteLogits, Sampler, SamplingRow, new_generator
from llm_svc.scheduler import Scheduler
from llm_svc.stops import StopStrings
from svc_common.errors import Internal, InvalidArgument, ResourceExhausted, ServiceError, Unavailable
from svc_common.health import StepAge
from svc_common.logs import get_logger

_log = get_logger("day0.engine")


@dataclass(slots=True)
class _Choice:
    """One sequence with all that follows its output."""

    sequence: Sequence
    row: SamplingRow
    detokenizer: Detokenizer
    stops: StopStrings
    max_tokens: int


@dataclass(slots=True)
class _Live:
    """A request the engine works on."""

    request: Request
    prompt: Prompt
    channel: OutputChannel
    choices: dict[int, _Choice] = field(default_factory=dict)
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy the engine is; see llm.v1.GetLoadResponse for the meaning of each count."""

    queued_tokens: int
    waiting_requests: int
    running_sequences: int
    free_blocks: int
    total_blocks: int
    free_state_slots: int
    total_state_slots: int


class Engine:
    """Owns scheduler, runner and sampler; every other thread talks to it through `submit`, `abort` and `nudge`.

    `wake` is called after a step with the channels that got something, from the engine's thread.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        sampler: Sampler,
        make_detokenizer: Callable[[], Detokenizer],
        end_token_ids: frozenset[int],
        observer: EngineObserver,
        step_age: StepAge,
        wake: Callable[[Rows[OutputChannel]], None],
    ) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._sampler = sampler
        self._make_detokenizer = make_detokenizer
        self._end_token_ids = end_token_ids
        self._observer = observer
        self._step_age = step_age
        self._wake = wake
        self._live: dict[str, _Live] = {}
        self._choice_of: dict[int, _Choice] = {}
        self._condition = threading.Condition()
        self._inbox: list[Callable[[], None]] = []
        self._nudged = False
        self._stopping = False
        self._touched: dict[int, OutputChannel] = {}
        self._load = self._measure()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.ended: Future[None] = Future()
        """Done when the thread has ended: with a result after `stop`, else with what killed it."""

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its current step; what still runs fails with UNAVAILABLE."""
        with self._condition:
            self._stopping = True
            self._condition.notify()
        self._thread.join()

    def check_fits(self, prompt: Prompt) -> None:
        """Refuses a prompt that could never be answered."""
        tokens, context = len(prompt.ids), self._runner.facts.context_tokens
        if not tokens < context:
            raise InvalidArgument(
                f"prompt has {tokens} tokens; the context holds {context} with at least one token of the answer",
                field="prompt",
                limit=context - 1,
                value=tokens,
            )
        capacity = self._scheduler.capacity_tokens
        if not tokens < capacity:
            raise ResourceExhausted(
                f"prompt has {tokens} tokens; the cache of this replica holds {capacity} with the answer",
                field="prompt",
                limit=capacity - 1,
                value=tokens,
                reason="CACHE_TOO_SMALL",
            )

    def submit(self, request: Request, prompt: Prompt, channel: OutputChannel) -> None:
        """Queues a request whose prompt `check_fits`; its events arrive on `channel`."""
        self._post(lambda: self._add(request, prompt, channel))

    def abort(self, request_id: str) -> None:
        """Drops a request and all it holds before the next step; does nothing when it is over already."""
        self._post(lambda: self._drop(request_id))

    def nudge(self) -> None:
        """Says that visual tokens arrived or a reader caught up."""
        with self._condition:
            self._nudged = True
            self._condition.notify()

    @property
    def load(self) -> EngineLoad:
        """The counters as of the last step; safe from any thread."""
        return self._load

    def _measure(self) -> EngineLoad:
        scheduler = self._scheduler
        waiting = scheduler.waiting
        return EngineLoad(
            queued_tokens=sum(len(s) + s.params.max_tokens - len(s.output_ids) for s in waiting),
            waiting_requests=len({s.request.request_id for s in waiting}),
            running_sequences=len(scheduler.running),
            free_blocks=scheduler.blocks.free,
            total_blocks=scheduler.blocks.num_blocks,
            free_state_slots=scheduler.slots.free,
            total_state_slots=scheduler.slots.num_slots,
        )

    def _post(self, action: Callable[[], None]) -> None:
        with self._condition:
            self._inbox.append(action)
            self._condition.notify()

    @property
    def alive(self) -> bool:
        """Whether the thread is there to take work."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:
            _log.exception("the engine's thread died")
            self._fail_all(Internal("the engine stopped", reason="ENGINE_DEAD"))
            self._publish()
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)

    def _loop(self) -> None:
        while self._take_inbox():
            batch = self._schedule()
            if batch.items:
                tokens = self._forward(batch)
                self._finish(batch, tokens)
            self._publish()
            if not batch.items:
                self._rest()
        self._fail_all(Unavailable("the service is shutting down", reason="SHUTTING_DOWN"))
        self._publish()

    def _take_inbox(self) -> bool:
        with self._condition:
            actions, self._inbox, self._nudged = self._inbox, [], False
            if self._stopping:
                return False
        for action in actions:
            action()
        return True

    def _rest(self) -> None:
        """Sleeps until something changes."""
        if self._scheduler.stuck():
            _log.error("the scheduler found nothing to run while sequences were ready; failing them")
            self._fail_all(Internal("the scheduler made no progress", reason="NO_PROGRESS"))
            self._publish()
        self._step_age.idle()
        with self._condition:
            self._condition.wait_for(lambda: self._inbox or self._nudged or self._stopping)

    def _schedule(self) -> Batch:
        for live in self._live.values():
            full = live.channel.full
            for choice in live.choices.values():
                choice.sequence.paused = full
        batch = self._scheduler.schedule()
        if batch.items:
            self._step_age.begin_waiting()
        for item in batch.items:
            self._observer.scheduled(item.sequence)
        return batch

    def _forward(self, batch: Batch) -> list[SampledToken | NonFiniteLogits | None]:
        """Tokens of `batch.sampled`; None for each of them when the forward failed."""
        try:
            logits = self._runner.run(batch)
            rows = [self._choice_of[item.sequence.id].row for item in batch.sampled]
            return list(self._sampler.sample(logits, rows))
        except Exception:
            _log.exception("a forward of %d tokens failed", batch.tokens)
            for item in batch.items:
                self._fail(item.sequence.request.request_id, Internal("the forward failed", reason="FORWARD_FAILED"))
            return [None] * len(batch.sampled)

    def _finish(self, batch: Batch, tokens: list[SampledToken | NonFiniteLogits | None]) -> None:
        self._step_age.step()
        self._scheduler.finish(batch)
        for item, token in zip(batch.sampled, tokens, strict=True):
            if item.sequence.status is not SequenceStatus.RUNNING:
                continue
            if isinstance(token, SampledToken):
                self._append(item.sequence, token)
            else:
                self._observer.non_finite_logits()
                error = Internal("the model produced logits that are not numbers", reason="NON_FINITE_LOGITS")
                self._fail(item.sequence.request.request_id, error)

    def _append(self, sequence: Sequence, token: SampledToken) -> None:
        """Adds a token to its sequence and ends the choice when it was the last one."""
        choice, live = self._choice_of[sequence.id], self._live[sequence.request.request_id]
        params = sequence.params
        sequence.output_ids.append(token.token_id)
        live.completion_tokens += 1
        self._observer.token(sequence)
        ends = token.token_id in params.stop_token_ids or (
            token.token_id in self._end_token_ids and not params.ignore_eos
        )
        text, stop = ("", None) if ends else choice.stops.push(choice.detokenizer.push(token.token_id))
        reason: FinishReason | None = None
        if ends or stop is not None:
            reason = FinishReason.STOP
        elif len(sequence.output_ids) >= choice.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not None and stop is None:
            rest, stop = choice.stops.push(choice.detokenizer.flush())
            text += rest
            if stop is None:
                text += choice.stops.flush()
            else:
                reason = FinishReason.STOP
        self._emit(live, TokenEvent(sequence.choice, text, (token,)))
        if reason is not None:
            self._emit(live, FinishEvent(sequence.choice, reason, stop))
            self._end_choice(live, sequence, reason)

    def _end_choice(self, live: _Live, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.choice == 0:
            live.cached_tokens = sequence.cached
        self._observer.finish(sequence, reason)
        self._scheduler.remove(sequence)
        self._runner.forget(sequence)
        del self._choice_of[sequence.id], live.choices[sequence.choice]
        if not live.choices:
            prompt = live.prompt
            self._emit(
                live,
                UsageEvent(len(prompt.ids), live.cached_tokens, prompt.visual_tokens, live.completion_tokens),
            )
            del self._live[live.request.request_id]

    def _add(self, request: Request, prompt: Prompt, channel: OutputChannel) -> None:
        params = request.sampling
        room = min(self._runner.facts.context_tokens, self._scheduler.capacity_tokens) - len(prompt.ids)
        live = _Live(request, prompt, channel)
        self._live[request.request_id] = live
        for index in range(params.n):
            sequence = Sequence(request, prompt, index)
            live.choices[index] = choice = _Choice(
                sequence=sequence,
                row=SamplingRow(params, self._generator(params, index), prompt.ids, sequence.output_ids),
                detokenizer=self._make_detokenizer(),
                stops=StopStrings(params.stop),
                max_tokens=min(params.max_tokens, room),
            )
            self._choice_of[sequence.id] = choice
            self._scheduler.add(sequence)
        self._observer.arrival(prompt)

    @staticmethod
    def _generator(params: SamplingParams, index: int) -> torch.Generator | None:
        if params.greedy:
            return None
        assert params.seed is not None, "a request that samples has a seed by now"
        return new_generator(params.seed, index)

    def _drop(self, request_id: str) -> None:
        """Frees all a request holds; does nothing when it is over."""
        live = self._live.pop(request_id, None)
        if live is None:
            return
        for choice in live.choices.values():
            self._observer.finish(choice.sequence, FinishReason.ABORT)
            self._scheduler.remove(choice.sequence)
            self._runner.forget(choice.sequence)
            del self._choice_of[choice.sequence.id]

    def _fail(self, request_id: str, error: ServiceError) -> None:
        live = self._live.get(request_id)
        if live is not None:
            self._drop(request_id)
            self._emit(live, FailureEvent(error))

    def _fail_all(self, error: ServiceError) -> None:
        for request_id in list(self._live):
            self._fail(request_id, error)

    def _emit(self, live: _Live, event: TokenEvent | FinishEvent | UsageEvent | FailureEvent) -> None:
        live.channel.push(event)
        self._touched[id(live.channel)] = live.channel

    def _publish(self) -> None:
        self._load = self._measure()
        self._observer.scheduler(self._scheduler)
        if self._touched:
            self._wake(list(self._touched.values()))
            self._touched = {}
