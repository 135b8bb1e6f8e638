"""`day0 demo`: the whole walk on one machine with a tiny random checkpoint and one photograph."""

from __future__ import annotations

import asyncio
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from day0.chat import ChatOptions, chat
from day0.photograph import draw_photograph
from day0.plan import ServeOptions, make_plans
from day0.serve import endpoints, running
from day0.service_process import ServiceFailed
from day0.stack import Stack

QUESTION = "What does the photograph show?"


async def demo(environ: Mapping[str, str], console: Console, *, max_tokens: int = 64) -> None:
    """Write the checkpoint, start three processes, ask, show the streamed answer, stop everything.

    Raises ServiceFailed or ServiceError when any step fails, an empty answer included, and CancelledError after a
    SIGTERM, when all is stopped.
    """
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with tempfile.TemporaryDirectory(prefix="day0-demo-") as name:
        folder = Path(name)
        model = folder / "tiny-glm5_next"
        with console.status("writing a tiny random glm5_next checkpoint"):
            from day0.tiny import write_tiny_checkpoint

            await asyncio.to_thread(write_tiny_checkpoint, model)
        picture = folder / "photograph.jpg"
        picture.write_bytes(draw_photograph())
        stack = Stack(make_plans(ServeOptions(model=str(model), port=0)), folder, environ)
        console.print(f"checkpoint  {model}\nphotograph  {picture} ({picture.stat().st_size} bytes)", highlight=False)
        async with running(stack, console):
            for line in endpoints(stack):
                console.print(f"{line['service']:<8}pid {line['pid']}, gRPC {line['target']}", highlight=False)
            target = stack.router_target
            assert target is not None
            console.print(f"\n> {QUESTION} [photograph.jpg]", markup=False, highlight=False)
            question = ChatOptions(QUESTION, (str(picture),), target, max_tokens=max_tokens, timeout_seconds=120)
            answer = await chat(question, console)
            if answer.usage is None or answer.usage.visual_tokens == 0 or answer.completion_tokens == 0:
                raise ServiceFailed(f"the answer lacks tokens: {answer.usage}")
        console.print(
            "\nThe checkpoint is random, so the words mean nothing; every step that made them is the real one.",
            style="dim",
        )
