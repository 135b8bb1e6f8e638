"""A request whose time is over while it waits for its turn ends by itself and is never run."""

from __future__ import annotations

from pathlib import Path

import grpc
import grpc.aio

from tests.loopback import LlmOnLoopback, chat, text_part


def test_deadline_while_queued(tiny_checkpoint: Path) -> None:
    with LlmOnLoopback(tiny_checkpoint, images=False, max_running_sequences=1) as service:

        async def queue_behind_a_long_answer() -> grpc.StatusCode:
            running = service.stub.Generate(chat(text_part("long"), max_tokens=3000, ignore_eos=True))
            while (await running.read()).WhichOneof("event") != "delta":
                pass
            try:
                await service.answer(chat(text_part("late"), max_tokens=5), timeout_seconds=0.2)
            except grpc.aio.AioRpcError as error:
                status = error.code()
            assert not running.done(), "the answer ahead was too short to queue behind"
            running.cancel()
            return status

        assert service.run(queue_behind_a_long_answer()) is grpc.StatusCode.DEADLINE_EXCEEDED
        service.wait_idle()
        # One prompt and no more was ever computed: a started request would have been observed in the queue's histogram.
        assert service.metric("day0_request_queue_time_seconds_count") == 1
        answer = service.ask(chat(text_part("next"), max_tokens=2, ignore_eos=True))
        assert len(answer.ids[0]) == 2
