"""The services of one machine live and end together."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from day0.plan import ServeOptions, make_plans
from day0.service_process import ServiceFailed
from day0.stack import Stack

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}


async def test_one_that_ends_before_it_is_ready_ends_the_rest(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    plans = make_plans(ServeOptions(str(tmp_path), port=0, settings=("llm.block_size=-1",)))
    stack = Stack(plans, tmp_path, ENVIRONMENT)
    with pytest.raises(ServiceFailed, match=r"the llm service ended with status 2[\s\S]*DAY0_LLM_BLOCK_SIZE"):
        async with stack:
            pids = [process.pid for process in stack.processes]
            assert len(pids) == 2
            await stack.ready()
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


async def test_states_are_told_in_order(tmp_path: Path) -> None:
    stack = Stack(
        make_plans(ServeOptions(None, only="router", port=0, llm_targets=("127.0.0.1:1",))), tmp_path, ENVIRONMENT
    )
    told: list[tuple[str, str]] = []
    stack.on_state = lambda name, state: told.append((name, state))
    async with stack:
        await stack.ready()
        assert stack.router_target == stack.processes[0].plan.target
    assert told == [("router", "starting"), ("router", "ready")]
