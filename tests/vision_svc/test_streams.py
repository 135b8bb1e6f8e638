"""Many streams on a real service: readers that leave, deadlines, full queues, fifty images at once."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import numpy as np
import pytest

from protos.vision.v1 import vision_pb2
from svc_common.errors import error_from_rpc
from tests.vision_svc.client import Gate, ServeVision, noise, refusal
from vision_svc.encoder import EncodeError, VisualTokens

# Case 38: leaving.


async def test_header_comes_before_the_encoder_has_run(serve_vision: ServeVision) -> None:
    client = await serve_vision()
    gate = Gate(client)
    call = client.stub.Encode(vision_pb2.EncodeRequest(data=noise(1)))
    assert (await call.read()).header.tokens > 0
    gate.open.set()
    assert [(await call.read()).WhichOneof("piece") for _ in range(2)] == ["chunk", "trailer"]
    assert await call.read() is grpc.aio.EOF


async def test_cancel_while_waiting_frees_the_place(serve_vision: ServeVision) -> None:
    client = await serve_vision(batch_wait_ms=0)
    gate = Gate(client)
    runs = asyncio.create_task(client.encode(noise(0)))
    await client.until(lambda load: load.running_images == 1)
    calls = [client.stub.Encode(vision_pb2.EncodeRequest(data=noise(seed))) for seed in range(1, 6)]
    for call in calls:
        await call.read()
    load = await client.until(lambda load: load.waiting_images == 5)
    assert load.waiting_patches > 0 and load.open_streams == 6
    for call in calls:
        call.cancel()
    await client.until(lambda load: load.waiting_images == 0 and load.waiting_patches == 0 and load.open_streams == 1)
    gate.open.set()
    await runs
    await client.until_idle()
    assert gate.batches == [1], "a cancelled image was encoded"
    assert (await client.encode(noise(1))).header.tokens


async def test_one_of_two_readers_leaves(serve_vision: ServeVision) -> None:
    client = await serve_vision()
    gate = Gate(client)
    stays = asyncio.create_task(client.encode(noise(1)))
    await client.until(lambda load: load.running_images == 1)
    leaves = client.stub.Encode(vision_pb2.EncodeRequest(data=noise(1)))
    await leaves.read()
    leaves.cancel()
    await client.until(lambda load: load.open_streams == 1)
    gate.open.set()
    assert (await stays).header.tokens
    await client.until_idle()


async def test_cancel_in_mid_stream(serve_vision: ServeVision) -> None:
    client = await serve_vision()
    pipeline = client.launcher.pipeline
    assert pipeline is not None
    # An image as large as a real model's, which the tiny tower cannot give: 24 MiB of tokens.
    rows = 24 * 1024**2 // 256
    large = VisualTokens(np.arange(rows * 64, dtype=np.float32).tobytes(), rows, 64, 2, rows * 2, b"")
    pipeline.cache.put(await pipeline.digest(noise(1)), large)
    call = client.stub.Encode(vision_pb2.EncodeRequest(data=noise(1)))
    assert (await call.read()).header.tokens == rows
    chunk = (await call.read()).chunk
    assert (chunk.offset, len(chunk.data)) == (0, 1024**2)
    assert (await client.load()).open_streams == 1, "the whole stream was buffered; the test shows nothing"
    call.cancel()
    await client.until_idle()
    assert (await client.encode(noise(2))).header.tokens


async def test_cancels_at_random_moments_leave_nothing(serve_vision: ServeVision) -> None:
    client = await serve_vision(cache_bytes=0)
    random = np.random.default_rng(7)

    async def leave(seed: int) -> None:
        call = client.stub.Encode(vision_pb2.EncodeRequest(data=noise(seed % 10)))
        for _ in range(int(random.integers(0, 4))):
            await call.read()
        call.cancel()

    async with asyncio.timeout(30):
        await asyncio.gather(*(leave(seed) for seed in range(100)))
        await client.until_idle()
    pipeline = client.launcher.pipeline
    assert pipeline is not None and pipeline.in_flight == 0 and pipeline._held_bytes == 0


# Case 39.
async def test_deadline_while_queued(serve_vision: ServeVision) -> None:
    client = await serve_vision(batch_wait_ms=0)
    gate = Gate(client)
    runs = asyncio.create_task(client.encode(noise(0)))
    await client.until(lambda load: load.running_images == 1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.encode(noise(1), timeout=0.2)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    await client.until(lambda load: load.open_streams == 1 and load.waiting_images == 0)
    gate.open.set()
    await runs
    assert gate.batches == [1], "dead work was started"


# Load.


async def test_fifty_at_once(serve_vision: ServeVision) -> None:
    client = await serve_vision(patch_budget=128)
    before = await client.load()
    images = [noise(seed, (30 + seed, 90)) for seed in range(25)]
    async with asyncio.timeout(60):
        results = await asyncio.gather(*(client.encode(images[number % 25]) for number in range(50)))
    assert len({result.data for result in results}) == 25
    for number in range(25):
        assert results[number].data == results[number + 25].data
    after = await client.until_idle()
    assert after.cached_images == 25
    after.cached_images = after.cached_bytes = 0
    assert after == before


async def test_full_queue(serve_vision: ServeVision) -> None:
    client = await serve_vision(max_waiting_images=2)
    gate = Gate(client)
    streams = [asyncio.create_task(client.encode(noise(seed))) for seed in (1, 2)]
    await client.until(lambda load: load.running_images + load.waiting_images == 2)
    error = await refusal(client, noise(3))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "max_waiting_images is 2" in error.details()
    assert error_from_rpc(error).reason == "QUEUE_FULL"
    gate.open.set()
    await asyncio.gather(*streams)
    assert (await client.encode(noise(3))).header.tokens


async def test_full_queue_of_bytes(serve_vision: ServeVision) -> None:
    size = len(noise(1))
    client = await serve_vision(max_image_bytes=size + 100, max_waiting_bytes=size + 100)
    gate = Gate(client)
    stream = asyncio.create_task(client.encode(noise(1)))
    await client.until(lambda load: load.running_images == 1)
    error = await refusal(client, noise(2))
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED and "max_waiting_bytes" in error.details()
    gate.open.set()
    await stream


async def test_prepared_pixels_are_bounded_and_all_end(serve_vision: ServeVision) -> None:
    client = await serve_vision(max_waiting_patches=1, cache_bytes=0, batch_wait_ms=0)
    async with asyncio.timeout(30):
        assert len(await asyncio.gather(*(client.encode(noise(seed)) for seed in range(20)))) == 20
        await client.until_idle()


async def test_broken_tokens_are_our_fault(serve_vision: ServeVision) -> None:
    client = await serve_vision()
    pipeline = client.launcher.pipeline
    assert pipeline is not None
    encode = pipeline.batcher._encode_batch
    pipeline.batcher._encode_batch = lambda images: [EncodeError("2 of 4 visual tokens are not finite")]
    error = await refusal(client, noise(1))
    assert error.code() == grpc.StatusCode.INTERNAL and "not finite" in error.details()
    pipeline.batcher._encode_batch = encode
    assert not (await client.encode(noise(1))).trailer.cached
