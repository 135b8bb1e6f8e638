"""`day0 chat`: one question with pictures, streamed to the terminal; knows no service process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from day0.client import Answer, RouterClient, chat_request, image_part, text_part
from day0.terminal import figures, figures_line, printable
from protos.common.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What `day0 chat` was asked for; None leaves a sampling value to the checkpoint."""

    question: str
    images: tuple[str, ...] = ()
    target: str = "127.0.0.1:50051"
    model: str = ""
    system: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    timeout_seconds: float | None = None


class UnreadableImage(ValueError):
    """An --image that cannot be read."""


def image_parts(images: Sequence[str]) -> list[common_pb2.Part]:
    """A part for each file, or for each `data:` or `http(s):` URL. Raises UnreadableImage naming the option."""
    parts = []
    for place in images:
        if place.split(":", 1)[0].lower() in ("data", "http", "https"):
            parts.append(image_part(place))
            continue
        try:
            parts.append(image_part(Path(place)))
        except OSError as error:
            raise UnreadableImage(f"--image: cannot read {place}: {error.strerror}") from None
    return parts


async def chat(options: ChatOptions, console: Console, *, as_json: bool = False) -> Answer:
    """Ask, show the answer as it comes and the figures after it. The pictures come before the question, in order.

    Raises ServiceError for a refused or failed request, UnreadableImage for a file.
    """
    sampling = common_pb2.SamplingParams(
        max_tokens=options.max_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed,
        stop=options.stop,
    )
    parts = [*image_parts(options.images), text_part(options.question)]
    request = chat_request(parts, system=options.system, model=options.model, sampling=sampling)

    def show(choice: int, text: str) -> None:
        console.print(printable(text), end="", markup=False, highlight=False, emoji=False, soft_wrap=True)
        console.file.flush()

    async with RouterClient(options.target) as client:
        answer = await client.ask(request, timeout_seconds=options.timeout_seconds, on_text=None if as_json else show)
    if as_json:
        document = {
            "request_id": answer.request_id,
            "text": answer.text,
            "token_ids": answer.token_ids.get(0, []),
            "finish_reason": answer.reasons.get(0),
            **figures(answer),
        }
        console.file.write(json.dumps(document, ensure_ascii=False) + "\n")
    else:
        console.print()
        console.print(figures_line(answer), style="dim", highlight=False, soft_wrap=True)
    return answer
