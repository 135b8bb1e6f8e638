"""Pictures and running vision services for the tests of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from protos.vision.v1 import vision_pb2_grpc
from svc_common.channel import open_channel
from tests.vision_svc.client import Bytes, Client, ServeVision
from vision_svc.launch import VisionLauncher
from vision_svc.settings import VisionSettings

IMAGES = Path(__file__).parent.parent / "data" / "images"


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread() -> None:
    """Small forwards on a shared machine: more threads only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def image_bytes() -> Bytes:
    """Reads a file of tests/data/images."""
    return lambda name: (IMAGES / name).read_bytes()


@pytest.fixture
async def serve_vision(tiny_checkpoint: Path) -> AsyncIterator[ServeVision]:
    """Starts a service with settings of the test's choice; `load=False` leaves it loading."""
    async with AsyncExitStack() as stack:

        async def serve(load: bool = True, **settings: Any) -> Client:
            settings = {"model": tiny_checkpoint, "drain_seconds": 2, **settings}
            launcher = VisionLauncher(VisionSettings(grpc_port=0, health_port=0, metrics_port=0, **settings))
            stack.push_async_callback(launcher.stop)
            await launcher.start()
            if load:
                await launcher.load()
            channel = open_channel(f"127.0.0.1:{launcher.server.grpc_port}")
            stack.push_async_callback(channel.close)
            return Client(launcher, vision_pb2_grpc.VisionServiceStub(channel))

        yield serve
