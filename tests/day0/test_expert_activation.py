"""Experts are counted as upstream's own gates choose them, text and pictures apart, and shown with their entropy."""

from __future__ import annotations

import base64
import json
import lzma
import math
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn
from transformers import AutoModelForImageTextToText, AutoTokenizer

from day0.cli import run
from day0.expert_activation.counts import ActivationCounts, ActivationError, Load
from day0.expert_activation.measure import measure_activation
from day0.heldout import read_held_out
from llm_svc.settings import LlmSettings

TOP_K, EXPERTS, LAYERS = 2, 8, 3


def picture() -> str:
    data = BytesIO()
    Image.effect_noise((56, 56), 80).convert("RGB").save(data, "PNG")
    return base64.b64encode(data.getvalue()).decode()


@pytest.fixture(scope="module")
def examples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two questions, one with a picture."""
    asked = [
        ("words", [{"text": "Which of the two is the larger, and by how much?"}]),
        ("pictures", [{"png": picture()}, {"text": "What is shown here?"}]),
    ]
    lines: list[dict[str, Any]] = [
        {"tasks": [{"name": name, "title": name, "must_reach": None} for name, _ in asked]},
        *({"task": name, "answer": "none", "messages": [["user", parts]]} for name, parts in asked),
    ]
    path = tmp_path_factory.mktemp("held-out") / "two.jsonl.xz"
    path.write_bytes(lzma.compress("\n".join(map(json.dumps, lines)).encode()))
    return path


def settings(folder: Path, **more: Any) -> LlmSettings:
    return LlmSettings(model=str(folder), block_size=16, max_running_sequences=1, threads=1, **more)


def upstream_choices(folder: Path, ids: list[int]) -> list[torch.Tensor]:
    """What upstream's unmodified gates choose for a text: counts [experts] of each layer."""
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    chosen: list[torch.Tensor] = []
    for module in model.modules():
        if type(module).__name__ == "Glm5NextTextTopkRouter":
            module.register_forward_hook(lambda module, args, output: chosen.append(output[2]))
    with torch.no_grad():
        model(input_ids=torch.tensor([ids]))
    return [torch.bincount(one.flatten(), minlength=EXPERTS) for one in chosen]


def test_text_is_counted_as_upstreams_gates_choose(tiny_checkpoint: Path, examples: Path) -> None:
    words = read_held_out(examples).choose(["words"], 0)
    found = measure_activation(settings(tiny_checkpoint), words)
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    question = words.examples[0].chat.messages[0].parts[0].text
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
    )["input_ids"]
    text = [load for load in found.loads if load.modality == "text"]
    assert [load.tokens for load in text] == [len(ids)] * LAYERS
    assert [list(load.counts) for load in text] == [one.tolist() for one in upstream_choices(tiny_checkpoint, ids)]
    assert all(load.tokens == 0 and load.entropy_bits == 0 for load in found.loads if load.modality == "visual")


def test_both_tiers_count_the_same(tiny_checkpoint: Path, examples: Path) -> None:
    words = read_held_out(examples).choose(["words"], 0)
    native, upstream = (
        measure_activation(settings(tiny_checkpoint, tier=tier), words) for tier in ("native", "upstream")
    )
    assert native.loads == upstream.loads
    assert (native.tier, upstream.tier) == ("native", "upstream")


def test_visual_tokens_are_counted_apart_however_the_prompt_is_cut(tiny_checkpoint: Path, examples: Path) -> None:
    pictures = read_held_out(examples).choose(["pictures"], 0)
    whole = measure_activation(settings(tiny_checkpoint), pictures)
    # 56 by 56 pixels are 4 by 4 patches of 14, merged two by two.
    assert [load.tokens for load in whole.loads if load.modality == "visual"] == [4] * LAYERS
    for load in whole.loads:
        assert len(load.counts) == EXPERTS and sum(load.counts) == TOP_K * load.tokens > 0
    assert measure_activation(settings(tiny_checkpoint, prefill_chunk_tokens=4), pictures).loads == whole.loads


def test_entropy_is_that_of_the_shares() -> None:
    even, one, uneven = (Load(0, "text", 1, counts) for counts in ((5, 5, 5, 5), (0, 9, 0, 0), (2, 1, 1, 0)))
    assert (even.entropy_bits, even.evenness, even.idle) == (2.0, 1.0, 0)
    assert (one.entropy_bits, one.evenness, one.idle) == (0.0, 0.0, 3)
    assert uneven.entropy_bits == pytest.approx(1.5)
    assert uneven.hottest(2) == [(0, 0.5), (1, 0.25)]
    assert math.isclose(uneven.evenness, 0.75)


def test_what_cannot_be_counted_is_an_error() -> None:
    class Experts(nn.Module):
        num_experts = 4

        def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return hidden

    counts = ActivationCounts()
    with pytest.raises(ActivationError, match="no module of experts was called"):
        counts.loads()
    counts.expect([False, True])
    with counts.watching(), pytest.raises(ActivationError, match=r"\[3, 1\] for 2 tokens"):
        Experts()(torch.zeros(3, 2), torch.zeros(3, 1, dtype=torch.long), torch.zeros(3, 1))
    with counts.watching():
        Experts()(torch.zeros(2, 2), torch.tensor([[3], [1]]), torch.zeros(2, 1))
    assert [load.counts for load in counts.loads()] == [(0, 0, 0, 1), (0, 1, 0, 0)]


def test_the_command_writes_a_table_json_and_a_plot(
    tiny_checkpoint: Path, examples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot, page = tmp_path / "experts.png", tmp_path / "experts.md"
    common = ["experts", str(tiny_checkpoint), "--examples", str(examples)]
    assert run([*common, "--plot", str(plot), "--markdown", str(page)], {}) == 0
    assert "visual" in capsys.readouterr().out
    image = Image.open(plot)
    assert image.format == "PNG" and image.width > 600 and len(image.convert("RGB").getcolors(1 << 24) or ()) > 50
    assert page.read_text().count("| visual |") == LAYERS
    assert run([*common, "--json"], {}) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["prompts"] == 2 and len(document["loads"]) == 2 * LAYERS
    assert run([*common, "--task", "songs"], {}) == 2
    assert "songs is not among words, pictures" in capsys.readouterr().err
