"""`day0 chat` shows text safely, prints figures and exits by the outcome."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from day0.chat import ChatOptions, UnreadableImage, chat, image_parts
from day0.cli import run
from day0.terminal import printable


def console() -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=200), out


async def test_streams_then_tells_figures(router, tmp_path: Path) -> None:
    picture = tmp_path / "a.png"
    picture.write_bytes(b"png")
    screen, out = console()
    options = ChatOptions("q", (str(picture),), router.target, system="s", max_tokens=8, temperature=0.0, seed=3)
    await chat(options, screen)
    text, figures = out.getvalue().splitlines()
    assert text == "Paris is it\\x1b[31m."
    assert figures.startswith("TTFT ") and "tokens/s" in figures
    assert "prompt 30 tokens (visual 12, cached 16)" in figures
    assert "answer 8 tokens, ended by stop" in figures
    request = router.requests[0]
    assert [part.WhichOneof("content") for part in request.chat.messages[1].parts] == ["image", "text"]
    assert (request.sampling.max_tokens, request.sampling.temperature, request.sampling.seed) == (8, 0.0, 3)
    assert request.sampling.HasField("temperature") and not request.sampling.HasField("top_p")


async def test_json_is_one_document(router) -> None:
    screen, out = console()
    await chat(ChatOptions("q", target=router.target), screen, as_json=True)
    document = json.loads(out.getvalue())
    assert document["text"] == "Paris is it\x1b[31m."
    assert document["token_ids"] == [0, 10, 1, 11, 2, 12, 3, 13]
    assert (document["visual_tokens"], document["cached_tokens"], document["completion_tokens"]) == (12, 16, 8)
    assert document["finish_reason"] == "stop" and document["ttft_ms"] > 0


@pytest.mark.parametrize(
    ("text", "shown"),
    [("a\n\tb", "a\n\tb"), ("\x1b[2J", "\\x1b[2J"), ("\r\x07\x9b", "\\x0d\\x07\\x9b"), ("世界 👩‍👩‍👧", "世界 👩‍👩‍👧")],
)
def test_text_cannot_drive_the_terminal(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_urls_are_left_to_the_router() -> None:
    data, remote = image_parts(["DATA:image/png;base64,AA==", "http://x/y.png"])
    assert (data.image.url, remote.image.url) == ("DATA:image/png;base64,AA==", "http://x/y.png")


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnreadableImage, match=r"--image: cannot read .*nothing\.png: No such file"):
        image_parts([str(tmp_path / "nothing.png")])


async def test_exit_status(router, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def status(*arguments: str) -> int:
        return await asyncio.to_thread(run, ["chat", *arguments, "--target", router.target], {})

    assert await status("q") == 0
    assert await status("refuse") == 1
    assert "INVALID_ARGUMENT: max_tokens: too large (limit 10, value 11)" in capfd.readouterr().err
    assert await status("q", "--image", str(tmp_path / "none.png")) == 2
    assert await status("q", "--no-such-option") == 2
