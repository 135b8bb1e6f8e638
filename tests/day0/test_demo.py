"""The demo's questions, its verdicts, and the whole walk as a user starts it."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from PIL import Image
from rich.console import Console

from day0.client import RouterClient, image_part, text_part
from day0.demo import chosen_examples, hold
from day0.embedded import embedded_held_out, embedded_model
from day0.heldout import Example
from day0.picture_display import half_blocks
from protos.common.v1 import common_pb2

ROOT = Path(__file__).resolve().parents[2]
# What the scripted router says, stripped.
SAID = "Paris is it\x1b[31m."


def start_demo(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}", "TMPDIR": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-m", "day0", "demo", *arguments],
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def children(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def conversation(picture: bytes, first: str, last: str) -> Example:
    user, assistant = common_pb2.ROLE_USER, common_pb2.ROLE_ASSISTANT
    messages = [
        common_pb2.Message(role=user, parts=[image_part(picture), text_part("Which?")]),
        common_pb2.Message(role=assistant, parts=[text_part(first)]),
        common_pb2.Message(role=user, parts=[text_part("And then?")]),
    ]
    return Example("capitals", common_pb2.Chat(messages=messages), last)


def drawn(colours: list[tuple[int, int, int]]) -> bytes:
    """A PNG of one column of pixels."""
    picture = Image.new("RGB", (1, len(colours)))
    picture.putdata(colours)
    data = io.BytesIO()
    picture.save(data, "PNG")
    return data.getvalue()


async def test_each_answer_is_held_to_its_sentence(router, tmp_path: Path) -> None:
    picture = drawn([(255, 0, 0)])
    console = Console(file=io.StringIO(), width=200)
    async with RouterClient(router.target) as client:
        verdicts = await hold(client, conversation(picture, SAID, "Rome."), tmp_path, console)
    assert verdicts == [True, False]
    # The second turn carries what the model said itself.
    assert router.requests[1].chat.messages[1].parts[0].text == SAID
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [picture]
    shown = console.file.getvalue()
    assert "expected: Rome." in shown and "\x1b[31m" not in shown
    assert shown.count("✓ right") == 1 and shown.count("✗ wrong") == 1


def test_the_questions_are_of_the_held_out_set() -> None:
    examples = [example for _, example in chosen_examples()]
    parts = [part for example in examples for message in example.chat.messages for part in message.parts]
    assert sum(part.HasField("image") for part in parts) >= 4
    assert max(len(part.text) for part in parts) > 10_000, "a long text is among them"
    assert any(len(example.chat.messages) > 2 for example in examples), "a second turn is among them"


def test_half_blocks_show_two_pixels_a_character() -> None:
    text = half_blocks(drawn([(255, 0, 0), (0, 0, 255)]), columns=1)
    assert text.plain == "▀\n"
    style = text.spans[0].style
    assert (style.color.triplet, style.bgcolor.triplet) == ((255, 0, 0), (0, 0, 255))


@pytest.mark.slow
def test_every_answer_is_right_without_a_terminal(tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = start_demo(temporary, "--pictures", str(tmp_path / "pictures"))
    shown, errors = process.communicate(timeout=300)
    assert process.returncode == 0, shown + errors
    assert "6 of 6 answers are right" in shown and "✗" not in shown and "\x1b" not in shown
    assert len(list((tmp_path / "pictures").glob("*.png"))) == 5
    # torch leaves an empty folder of its own there.
    assert list(temporary.glob("day0-*")) == []


def test_sigterm_leaves_nothing(tmp_path: Path) -> None:
    process = start_demo(tmp_path)
    try:
        assert process.stdout is not None
        next(line for line in process.stdout if line.startswith("router: ready"))
        services = children(process)
        assert len(services) >= 3
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=120)
    assert process.returncode == 143
    assert not [child for child in services if child.is_running()]
    assert list(tmp_path.glob("day0-*")) == []


def test_the_package_holds_what_the_demo_needs() -> None:
    names = {path.name for path in embedded_model().iterdir()}
    assert {"config.json", "tokenizer.json", "chat_template.jinja", "preprocessor_config.json"} <= names
    assert {"day0-manifest.json", "golden-logits.json", "model.safetensors.index.json"} <= names
    everything = [path for path in embedded_held_out().parent.rglob("*") if path.suffix not in (".py", ".pyc")]
    assert sum(path.stat().st_size for path in everything if path.is_file()) < 28 * 2**20
