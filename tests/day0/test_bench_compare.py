"""`day0 bench serve --compare-upstream` starts real services, and tells equal tokens and both rates."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}


@pytest.mark.slow
def test_compares_on_the_same_prompts(tiny_checkpoint: Path, tmp_path: Path) -> None:
    shape = ["--num-prompts", "3", "--random-input-len", "20", "--random-output-len", "5", "--max-concurrency", "2"]
    how = ["--rounds", "2", "--threads", "1", "--json", "--save-result", "--result-dir", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "day0", "bench", "serve", "--compare-upstream", str(tiny_checkpoint), *shape, *how],
        cwd=ROOT,
        env=ENVIRONMENT,
        text=True,
        capture_output=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads((tmp_path / "compare-upstream.json").read_text())
    assert result["tokens_equal"] is True and result["tier"] == "native"
    assert len(result["rounds"]) == 2
    for each in result["rounds"]:
        assert (each["completed"], each["total_input_tokens"], each["total_output_tokens"]) == (3, 60, 15)
        assert each["total_cached_tokens"] == 0, "a prefix hit would flatter the services"
        assert each["ratio"] == pytest.approx(each["output_throughput"] / each["upstream_output_throughput"])
    assert {"cpu", "cores", "os", "python", "torch", "transformers"} <= result["environment"].keys()
