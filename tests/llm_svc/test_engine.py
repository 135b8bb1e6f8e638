"""The engine over a scripted runner: who gets which tokens, and that every way out frees everything."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from llm_svc.cache.block_pool import BlockPool
from llm_svc.cache.state_slots import Snapshots, StateSlots
from llm_svc.core import Batch, FinishReason, Prompt, PromptTokens, Request, SamplingParams
from llm_svc.core import Sequence as TokenSequence
from llm_svc.detokenizer import Detokenizer, spellings_of
from llm_svc.engine import Engine
from llm_svc.model_runner import ModelFacts
from llm_svc.observe import EngineObserver
from llm_svc.output import Event, FailureEvent, FinishEvent, OutputChannel, TokenEvent, UsageEvent
from llm_svc.sampler import Sampler
from llm_svc.scheduler import Scheduler, SchedulerLimits
from svc_common.errors import Internal, InvalidArgument, ResourceExhausted, Unavailable
from svc_common.health import StepAge
from svc_common.metrics import EngineMetrics

VOCAB = 640
END = 600
CONTEXT = 100


class ScriptedRunner:
    """The next token is the last one plus one; `before` gets each batch and may block, raise or spoil rows."""

    def __init__(self) -> None:
        self.facts = ModelFacts("Scripted", "native", CONTEXT, VOCAB, "float32", 0, None, {}, 0)
        self.before: Callable[[Batch, torch.Tensor], None] = lambda batch, logits: None
        self.batches: list[Batch] = []
        self.forgotten: list[int] = []

    def run(self, batch: Batch) -> torch.Tensor:
        logits = torch.zeros(len(batch.sampled), VOCAB)
        for row, item in enumerate(batch.sampled):
            last = item.sequence.token_ids(item.start + item.count - 1, item.start + item.count)[0]
            logits[row, (last + 1) % VOCAB] = 5.0
        self.batches.append(batch)
        self.before(batch, logits)
        return logits

    def prepare(self) -> None:
        pass

    def forget(self, sequence: TokenSequence) -> None:
        self.forgotten.append(sequence.id)


class Bench:
    """An engine with small pools, and the streams of its requests."""

    def __init__(self, tokenizer: object) -> None:
        self.runner = ScriptedRunner()
        self.scheduler = Scheduler(SchedulerLimits(64, 16, 8), BlockPool(32, 4), StateSlots(8), Snapshots(8))
        self.metrics = EngineMetrics()
        self.step_age = StepAge()
        spellings = spellings_of(tokenizer)
        loop = asyncio.get_running_loop()

        def wake(channels: Sequence[OutputChannel]) -> None:
            loop.call_soon_threadsafe(lambda: [channel.wake() for channel in channels])

        self.engine = Engine(
            self.runner,
            self.scheduler,
            Sampler(VOCAB),
            lambda: Detokenizer(spellings),
            frozenset({END}),
            EngineObserver(self.metrics),
            self.step_age,
            wake,
        )
        self.count = 0

    def submit(self, ids: list[int], buffer_tokens: int = 64, **sampling: object) -> tuple[str, OutputChannel]:
        self.count += 1
        name = f"request-{self.count}"
        params = SamplingParams(**{"max_tokens": 4} | sampling)  # type: ignore[arg-type]
        request = Request(name, (PromptTokens(tuple(ids)),), (), params)
        channel = OutputChannel(asyncio.get_running_loop(), limit_tokens=buffer_tokens)
        self.engine.submit(request, Prompt(tuple(ids)), channel)
        return name, channel

    async def ask(self, ids: list[int], **sampling: object) -> list[Event]:
        _, channel = self.submit(ids, **sampling)
        return await read(channel)

    async def idle(self) -> None:
        """Waits until the counters are back at their start values."""
        async with asyncio.timeout(10):
            while True:
                load = self.engine.load
                if not load.running_sequences + load.waiting_requests and load.free_blocks == load.total_blocks:
                    assert load.free_state_slots == load.total_state_slots
                    return
                await asyncio.sleep(0.005)


async def read(channel: OutputChannel) -> list[Event]:
    events: list[Event] = []
    async with asyncio.timeout(20):
        while not (events and isinstance(events[-1], UsageEvent | FailureEvent)):
            new, _ = await channel.next_events()
            events += new
    return events


def ids_of(events: list[Event], choice: int = 0) -> list[int]:
    return [t.token_id for e in events if isinstance(e, TokenEvent) and e.choice == choice for t in e.tokens]


def text_of(events: list[Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, TokenEvent))


def finish_of(events: list[Event]) -> FinishEvent:
    return next(e for e in events if isinstance(e, FinishEvent))


@pytest.fixture
async def bench(tiny_checkpoint: Path) -> AsyncIterator[Bench]:
    bench = Bench(AutoTokenizer.from_pretrained(tiny_checkpoint))
    bench.engine.start()
    yield bench
    await asyncio.to_thread(bench.engine.stop)


async def test_tokens_finish_and_usage_come_in_order(bench: Bench) -> None:
    events = await bench.ask([5, 6, 7], max_tokens=3)
    assert ids_of(events) == [8, 9, 10]
    assert finish_of(events) == FinishEvent(0, FinishReason.LENGTH, None)
    assert events[-1] == UsageEvent(3, 0, 0, 3)
    await bench.idle()


async def test_end_token_ends_and_its_text_is_not_shown(bench: Bench) -> None:
    events = await bench.ask([END - 2], max_tokens=9)
    assert ids_of(events) == [END - 1, END]
    assert finish_of(events).reason is FinishReason.STOP
    await bench.idle()
    on = await bench.ask([END - 2], max_tokens=4, ignore_eos=True)
    assert ids_of(on) == [END - 1, END, END + 1, END + 2]
    stopped = await bench.ask([50], max_tokens=9, stop_token_ids=frozenset({52}))
    assert ids_of(stopped) == [51, 52]


async def test_stop_string_cuts_the_text_before_it(bench: Bench, tiny_checkpoint: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    start = tokenizer.convert_tokens_to_ids("A")
    full = tokenizer.decode(range(start + 1, start + 9))
    stop = full[3:5]
    events = await bench.ask([start], max_tokens=8, stop=(stop,))
    assert text_of(events) == full[:3]
    assert finish_of(events) == FinishEvent(0, FinishReason.STOP, stop)


async def test_answer_ends_where_the_context_does(bench: Bench) -> None:
    events = await bench.ask([3] * (CONTEXT - 1), max_tokens=50)
    assert len(ids_of(events)) == 1
    assert finish_of(events).reason is FinishReason.LENGTH


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1])
async def test_prompt_as_long_as_the_context_is_refused(bench: Bench, length: int) -> None:
    with pytest.raises(InvalidArgument, match=rf"prompt has {length} tokens; the context holds {CONTEXT}"):
        bench.engine.check_fits(Prompt((1,) * length))
    bench.engine.check_fits(Prompt((1,) * (CONTEXT - 1)))


async def test_prompt_that_can_never_get_blocks_is_refused(bench: Bench) -> None:
    bench.scheduler.blocks = BlockPool(8, 4)
    with pytest.raises(ResourceExhausted, match="prompt has 32 tokens; the cache of this replica holds 32"):
        bench.engine.check_fits(Prompt((1,) * 32))
    bench.engine.check_fits(Prompt((1,) * 31))


async def test_choices_share_the_prompt_and_all_end(bench: Bench) -> None:
    events = await bench.ask([5, 6, 7, 8, 9], n=3, max_tokens=4)
    assert [ids_of(events, choice) for choice in range(3)] == [[10, 11, 12, 13]] * 3
    assert sorted(e.choice for e in events if isinstance(e, FinishEvent)) == [0, 1, 2]
    assert events[-1] == UsageEvent(5, 0, 0, 12)
    restored = [item for batch in bench.runner.batches for item in batch.items if item.restore is not None]
    assert {item.sequence.choice for item in restored} == {1, 2}, "later choices start from the first one's prompt"
    await bench.idle()


async def test_seed_belongs_to_the_choice(bench: Bench) -> None:
    sampling = {"temperature": 2.0, "seed": 42, "n": 2, "max_tokens": 16, "ignore_eos": True}
    first = await bench.ask([5, 6], **sampling)
    others = [bench.submit([9, index])[1] for index in range(5)]
    again = await bench.ask([5, 6], **sampling)
    assert [ids_of(first, c) for c in (0, 1)] == [ids_of(again, c) for c in (0, 1)]
    assert ids_of(first, 0) != ids_of(first, 1)
    for channel in others:
        await read(channel)


async def test_abort_frees_within_one_step(bench: Bench) -> None:
    entered, leave = threading.Event(), threading.Event()

    def hold(batch: Batch, logits: torch.Tensor) -> None:
        entered.set()
        leave.wait(10)

    bench.runner.before = hold
    name, _ = bench.submit([1, 2, 3], max_tokens=50)
    await asyncio.to_thread(entered.wait, 10)
    bench.engine.abort(name)
    steps = len(bench.runner.batches)
    bench.runner.before = lambda batch, logits: None
    leave.set()
    await bench.idle()
    assert len(bench.runner.batches) == steps, "an aborted request ran once more"
    assert ids_of(await bench.ask([1, 2, 3])) == [4, 5, 6, 7]


async def test_failed_forward_fails_its_requests_and_the_next_works(bench: Bench) -> None:
    def fail(batch: Batch, logits: torch.Tensor) -> None:
        raise RuntimeError("the device is on fire")

    bench.runner.before = fail
    events = await bench.ask([1, 2, 3])
    assert isinstance(events[-1], FailureEvent)
    assert isinstance(events[-1].error, Internal) and "fire" not in events[-1].error.message
    bench.runner.before = lambda batch, logits: None
    assert ids_of(await bench.ask([1, 2, 3])) == [4, 5, 6, 7]
    await bench.idle()


async def test_row_that_is_not_a_number_fails_that_request_alone(bench: Bench) -> None:
    def spoil(batch: Batch, logits: torch.Tensor) -> None:
        for row, item in enumerate(batch.sampled):
            if item.sequence.prompt.ids[0] == 13:
                logits[row, 0] = float("nan")

    bench.runner.before = spoil
    _, broken = bench.submit([13, 2])
    _, sound = bench.submit([14, 2])
    broken_events, sound_events = await read(broken), await read(sound)
    assert isinstance(broken_events[-1], FailureEvent)
    assert broken_events[-1].error.reason == "NON_FINITE_LOGITS"
    assert ids_of(sound_events) == [3, 4, 5, 6]
    assert "day0_nan_logits_total 1.0" in bench.metrics.text()
    await bench.idle()


async def test_slow_reader_pauses_its_own_request(bench: Bench) -> None:
    _, slow = bench.submit([1, 2], buffer_tokens=5, max_tokens=60)
    while not slow.full:
        await asyncio.sleep(0.005)
    quick = await bench.ask([3, 4], max_tokens=60)
    assert len(ids_of(quick)) == 60
    events, was_full = await slow.next_events()
    assert was_full and len(ids_of(events)) == 5, "the engine went on for a reader that does not read"
    while not isinstance(events[-1], UsageEvent):
        bench.engine.nudge()
        new, _ = await slow.next_events()
        events += new
    assert ids_of(events) == list(range(3, 63))
    await bench.idle()


async def test_stopping_ends_what_runs(bench: Bench) -> None:
    _, channel = bench.submit([1, 2], buffer_tokens=1, max_tokens=60)
    while not channel.full:
        await asyncio.sleep(0.005)
    await asyncio.to_thread(bench.engine.stop)
    events = await read(channel)
    assert isinstance(events[-1], FailureEvent) and isinstance(events[-1].error, Unavailable)


async def test_scheduler_without_progress_fails_the_work_instead_of_hanging(bench: Bench) -> None:
    bench.scheduler.schedule = lambda: Batch(())  # type: ignore[method-assign]
    events = await bench.ask([1, 2])
    assert isinstance(events[-1], FailureEvent) and events[-1].error.reason == "NO_PROGRESS"


async def test_engine_that_dies_says_so_and_fails_its_work(bench: Bench) -> None:
    def break_down() -> Batch:
        raise SystemError("a bug of the scheduler")

    bench.scheduler.schedule = break_down  # type: ignore[method-assign]
    events = await bench.ask([1, 2])
    assert isinstance(events[-1], FailureEvent) and events[-1].error.reason == "ENGINE_DEAD"
    with pytest.raises(SystemError):
        await asyncio.wrap_future(bench.engine.ended)
    assert not bench.engine.alive


async def test_step_age_counts_only_while_a_step_is_stuck(bench: Bench) -> None:
    entered, leave = threading.Event(), threading.Event()

    def hold(batch: Batch, logits: torch.Tensor) -> None:
        entered.set()
        leave.wait(10)

    bench.runner.before = hold
    _, channel = bench.submit([1, 2], max_tokens=1)
    await asyncio.to_thread(entered.wait, 10)
    while bench.step_age.age_seconds() <= 0:
        await asyncio.sleep(0.001)
    assert not bench.step_age.alive(0.0)
    leave.set()
    await read(channel)
    await bench.idle()
    async with asyncio.timeout(10):
        while bench.step_age.age_seconds() > 0:
            await asyncio.sleep(0.005)


async def test_hundred_aborts_at_random_moments_leave_nothing(bench: Bench) -> None:
    generator = torch.Generator().manual_seed(3)
    moments = torch.rand(100, generator=generator).tolist()

    async def one(index: int) -> None:
        name, _ = bench.submit([index, 2, 3, 4, 5, 6], max_tokens=30)
        await asyncio.sleep(moments[index] * 0.05)
        bench.engine.abort(name)

    await asyncio.gather(*map(one, range(100)))
    await bench.idle()
    assert not bench.engine._live and not bench.engine._choice_of
