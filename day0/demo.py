"""`day0 demo`: the embedded model is started, asked about pictures and a long text, and held to the right answers."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console

from day0.client import Answer, RouterClient
from day0.embedded import embedded_held_out, embedded_model
from day0.heldout import Example, read_held_out
from day0.picture_display import half_blocks
from day0.plan import ServeOptions, make_plans
from day0.serve import endpoints, running
from day0.stack import Stack
from day0.terminal import figures_line, printable
from protos.common.v1 import common_pb2
from protos.router.v1 import router_pb2

# What is asked: a task of the held-out set, and which of its examples.
CONVERSATIONS = (("shapes", 1), ("numbers", 1), ("two_pictures", 2), ("second_turns", 4), ("needle_4k", 1))
MAX_ANSWER_TOKENS = 64
REQUEST_SECONDS = 120.0
# Of a text longer than both together the middle is left out.
SHOWN_HEAD_CHARACTERS, SHOWN_TAIL_CHARACTERS = 90, 110


async def demo(environ: Mapping[str, str], console: Console, *, pictures: Path | None = None) -> bool:
    """Start three processes, ask, show each streamed answer, stop everything; whether every answer was right.

    The pictures are kept in the folder `pictures`; without one they go when the demo ends. Raises ServiceFailed or
    ServiceError when a step fails, and CancelledError after a SIGTERM, when all is stopped.
    """
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with tempfile.TemporaryDirectory(prefix="day0-demo-") as name:
        folder = pictures or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        stack = Stack(make_plans(ServeOptions(model=str(embedded_model()), port=0)), Path(name), environ)
        console.print(f"pictures  {folder}", markup=False, highlight=False, soft_wrap=True)
        async with running(stack, console):
            for line in endpoints(stack):
                console.print(f"{line['service']:<8}pid {line['pid']}, gRPC {line['target']}", highlight=False)
            assert stack.router_target is not None
            async with RouterClient(stack.router_target) as client:
                verdicts = []
                for title, example in chosen_examples():
                    console.rule(title, style="dim", align="left")
                    verdicts += await hold(client, example, folder, console)
    console.print(f"\n{sum(verdicts)} of {len(verdicts)} answers are right, to the letter", highlight=False)
    return all(verdicts)


def chosen_examples() -> list[tuple[str, Example]]:
    """The conversations of the demo, each with its task's title. Raises HeldOutError."""
    held_out = read_held_out(embedded_held_out())
    titles = {task.name: task.title for task in held_out.tasks}
    return [(titles[name], held_out.choose([name], place + 1).examples[-1]) for name, place in CONVERSATIONS]


async def hold(client: RouterClient, example: Example, folder: Path, console: Console) -> list[bool]:
    """Go through a conversation turn by turn, the model's own answers in between; which were the expected sentence."""
    said = common_pb2.Chat()
    verdicts = []
    for message, expected in _turns(example):
        said.messages.append(message)
        if message.role != common_pb2.ROLE_USER:
            continue
        _show_question(message, folder, f"{example.task}-{len(said.messages)}", console)
        answer = await _ask(client, said, console)
        text = answer.text.strip()
        verdicts.append(text == expected)
        verdict = "[green]✓ right[/]" if verdicts[-1] else "[red]✗ wrong[/]"
        console.print(f"  {verdict}", highlight=False)
        if not verdicts[-1]:
            console.print(f"expected: {printable(expected)}", markup=False, highlight=False, soft_wrap=True)
        console.print(figures_line(answer), style="dim", highlight=False, soft_wrap=True)
        said.messages.append(common_pb2.Message(role=common_pb2.ROLE_ASSISTANT, parts=[common_pb2.Part(text=text)]))
    return verdicts


def _turns(example: Example) -> Iterator[tuple[common_pb2.Message, str]]:
    """What is said to the model, each message with the answer that is expected to it."""
    messages = list(example.chat.messages)
    for place, message in enumerate(messages):
        if message.role != common_pb2.ROLE_ASSISTANT:
            last = place + 1 == len(messages)
            yield message, example.answer if last else "".join(part.text for part in messages[place + 1].parts)


def _show_question(message: common_pb2.Message, folder: Path, name: str, console: Console) -> None:
    words = []
    for number, part in enumerate(message.parts, 1):
        if part.HasField("image"):
            path = folder / f"{name}-{number}.png"
            path.write_bytes(part.image.data)
            console.print(path, markup=False, highlight=False, soft_wrap=True)
            if console.is_terminal:
                console.print(half_blocks(part.image.data), end="")
            words.append(f"[{path.name}]")
        else:
            words.append(_shortened(part.text.strip()))
    console.print("> " + " ".join(words), markup=False, highlight=False, soft_wrap=True)


def _shortened(text: str) -> str:
    left_out = len(text) - SHOWN_HEAD_CHARACTERS - SHOWN_TAIL_CHARACTERS
    if left_out <= 0:
        return text
    return f"{text[:SHOWN_HEAD_CHARACTERS]} … {left_out:,} characters … {text[-SHOWN_TAIL_CHARACTERS:]}"


async def _ask(client: RouterClient, chat: common_pb2.Chat, console: Console) -> Answer:
    def show(choice: int, text: str) -> None:
        console.print(printable(text), end="", markup=False, highlight=False, emoji=False, soft_wrap=True)
        console.file.flush()

    request = router_pb2.GenerateRequest(
        chat=chat, sampling=common_pb2.SamplingParams(temperature=0.0, max_tokens=MAX_ANSWER_TOKENS)
    )
    return await client.ask(request, timeout_seconds=REQUEST_SECONDS, on_text=show)
