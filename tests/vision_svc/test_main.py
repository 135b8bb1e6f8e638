"""The real process: bad settings, bad checkpoints, a served image, SIGTERM."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from protos.vision.v1 import vision_pb2, vision_pb2_grpc
from svc_common.channel import open_channel
from tests.vision_svc.checkpoints import vision_files

ROOT = Path(__file__).parent.parent.parent


@asynccontextmanager
async def process(**variables: str) -> AsyncIterator[asyncio.subprocess.Process]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("DAY0_")}
    environ |= {f"DAY0_VISION_{name}": value for name, value in variables.items()}
    started = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "vision_svc", cwd=ROOT, env=environ, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(90):
            yield started
    finally:
        if started.returncode is None:
            started.kill()
            await started.wait()


PORTS = {"GRPC_PORT": "0", "HEALTH_PORT": "0", "METRICS_PORT": "0", "ENCODE_THREADS": "1"}


async def log_line(started: asyncio.subprocess.Process, message: str) -> dict[str, object]:
    assert started.stderr is not None
    async for line in started.stderr:
        if line.startswith(b"{") and json.loads(line)["message"] == message:
            return json.loads(line)
    raise AssertionError(f"the process ended without saying {message!r}")


async def test_bad_setting_ends_with_2_and_names_the_variable() -> None:
    async with process(MODEL="/m", PATCH_BUGDET="1") as started:
        _, errors = await started.communicate()
    assert started.returncode == 2
    assert b"DAY0_VISION_PATCH_BUGDET" in errors and b"DAY0_VISION_PATCH_BUDGET" in errors


# Case 43: a failed load exits non-zero.
async def test_missing_shards_end_with_1_and_are_listed(tiny_checkpoint: Path, tmp_path: Path) -> None:
    checkpoint = Path(shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint"))
    files = vision_files(checkpoint)
    for file in files:
        (checkpoint / file).unlink()
    async with process(MODEL=str(checkpoint), **PORTS) as started:
        _, errors = await started.communicate()
    assert started.returncode == 1
    assert b"weight files are missing" in errors
    assert all(file.encode() in errors for file in files)


async def test_folder_that_is_no_checkpoint_ends_with_1(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("nothing")
    for model, says in ((tmp_path / "absent", "no such folder"), (tmp_path, f"config.json: is not in {tmp_path}")):
        async with process(MODEL=str(model), **PORTS) as started:
            _, errors = await started.communicate()
        assert started.returncode == 1
        assert f"the service failed: model: {'' if model == tmp_path else model}" in errors.decode()
        assert says in errors.decode()


# Case 44: SIGTERM.
async def test_serves_and_ends_on_sigterm(tiny_checkpoint: Path, image_bytes: Callable[[str], bytes]) -> None:
    async with process(MODEL=str(tiny_checkpoint), **PORTS) as started:
        port = (await log_line(started, "vision listens"))["grpc_port"]
        await log_line(started, "ready")
        async with open_channel(f"127.0.0.1:{port}") as channel:
            call = vision_pb2_grpc.VisionServiceStub(channel).Encode(
                vision_pb2.EncodeRequest(data=image_bytes("gray.jpg"))
            )
            assert [piece.WhichOneof("piece") async for piece in call] == ["header", "chunk", "trailer"]
        started.send_signal(signal.SIGTERM)
        await started.communicate()
    assert started.returncode == 0
