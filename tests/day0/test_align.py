"""`day0 align` agrees on sound models and names the operator that was broken on purpose."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.glm5_next import modeling_glm5_next as definition

from day0.align.alignment import Alignment, Loaded, align_loaded
from day0.align.reference import AlignError, decode_packed, environment
from day0.align.tap import Verdict, accumulated, compare_choice, compare_values, tolerance
from day0.cli import run
from day0.quantize import quantize_checkpoint
from llm_svc.adopt.glm5_next import SparseAttention
from llm_svc.native_model import NativeModel
from llm_svc.native_runner import NativeRunner
from vision_svc.encoder import Encoder

Fault = Callable[[pytest.MonkeyPatch, Loaded], None]


@pytest.fixture(scope="module")
def plain(tiny_checkpoint: Path) -> Iterator[Loaded]:
    torch.set_num_threads(1)
    yield Loaded(tiny_checkpoint, "float32")


@pytest.fixture(scope="module")
def packed(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    folder = tmp_path_factory.mktemp("align") / "packed"
    quantize_checkpoint(tiny_checkpoint, folder)
    yield Loaded(folder, "float32")


def check(loaded: Loaded, *, end_to_end: bool = False) -> Alignment:
    return align_loaded(loaded, "float32", environment(), end_to_end=end_to_end)


def model_of(loaded: Loaded) -> NativeModel:
    assert isinstance(loaded.native.runner, NativeRunner)
    return loaded.native.runner.model


def break_operator(patch: pytest.MonkeyPatch, loaded: Loaded, name: str, wrong: Callable[..., Any]) -> None:
    """`wrong` gets the sound operator and its arguments."""
    model = model_of(loaded)
    sound = getattr(model.operators, name)
    operators = replace(model.operators, **{name: lambda *args, **kwargs: wrong(sound, *args, **kwargs)})
    patch.setattr(loaded.native.runner, "model", replace(model, operators=operators))


def off_by_one_slot(patch: pytest.MonkeyPatch, loaded: Loaded) -> None:
    def wrong(sound: Any, rows: Tensor, cache: Tensor, slots: Tensor) -> Any:
        return sound(rows, cache, slots + 1)

    break_operator(patch, loaded, "kv_store", wrong)


def stale_indices(patch: pytest.MonkeyPatch, loaded: Loaded) -> None:
    """Attention of one forward takes the choice of the forward before, where that had as many tokens."""
    sound = SparseAttention._attend
    before: dict[int, Tensor] = {}

    def attend(self: Any, context: Any, layer: Any, q: Tensor, chosen: Tensor) -> Tensor:
        last = before.get(self.layer_idx, chosen)
        before[self.layer_idx] = chosen
        return sound(self, context, layer, q, last if last.shape == chosen.shape else chosen)

    patch.setattr(SparseAttention, "_attend", attend)


def missing_tail(patch: pytest.MonkeyPatch, loaded: Loaded) -> None:
    def wrong(sound: Any, *args: Any, **options: Any) -> Tensor:
        chosen = sound(*args, **{**options, "always_tail": False})
        return torch.nn.functional.pad(chosen, (0, options["pool_size"] - 1), value=-1)

    break_operator(patch, loaded, "index_select_prefill", wrong)


def wrong_pool_boundary(patch: pytest.MonkeyPatch, loaded: Loaded) -> None:
    def wrong(sound: Any, *args: Any, **options: Any) -> Any:
        return sound(*args[:-1], args[-1] + 1, **options)

    break_operator(patch, loaded, "index_pool", wrong)


def last_delta_chunk(patch: pytest.MonkeyPatch, loaded: Loaded) -> None:
    def wrong(sound: Any, *args: Any, chunk_size: int, **options: Any) -> Any:
        *rows, state, slots, bounds = args
        kept, cut = state.clone(), max(int(bounds[-1]) - chunk_size, 0)
        out = sound(*args, chunk_size=chunk_size, **options)
        if cut:
            sound(*(row[:cut] for row in rows), kept, slots, bounds.clamp(max=cut), chunk_size=chunk_size, **options)
        state.copy_(kept)
        return out

    break_operator(patch, loaded, "gated_delta_prefill", wrong)


def experts_of(loaded: Loaded) -> list[Any]:
    layers = model_of(loaded).language_model.layers
    return [layer.mlp.experts for layer in layers if hasattr(layer.mlp, "experts")]


def swapped_gate_and_up(patch: pytest.MonkeyPatch, loaded: Loaded) -> None:
    for experts in experts_of(loaded):
        weight = experts.gate_up_proj
        patch.setattr(weight, "data", weight.data.roll(experts.intermediate_dim, 1))


def nibble_order(patch: pytest.MonkeyPatch, loaded: Loaded) -> None:
    def wrong(sound: Any, rows: Tensor, codes: Tensor, *rest: Any) -> Tensor:
        return sound(rows, (codes << 4) | (codes >> 4), *rest)

    break_operator(patch, loaded, "mxfp4_expert_gemm", wrong)


def swapped_scale_layout(patch: pytest.MonkeyPatch, loaded: Loaded) -> None:
    """Scales [N, K / 32] read as if they lay [K / 32, N]."""

    def wrong(sound: Any, rows: Tensor, codes: Tensor, scales: Tensor, *rest: Any) -> Tensor:
        other = scales.flatten(1).view(len(scales), scales.shape[2], scales.shape[1]).transpose(1, 2).contiguous()
        return sound(rows, codes, other, *rest)

    break_operator(patch, loaded, "mxfp4_expert_gemm", wrong)


def interleaved_rope(patch: pytest.MonkeyPatch, loaded: Loaded) -> None:
    """Our tower pairs neighbouring dimensions where upstream pairs the halves."""
    encode = Encoder.encode

    def wrong(self: Encoder, images: Any) -> Any:
        rope = definition.apply_rotary_pos_emb_vision

        def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
            half = cos.shape[-1] // 2
            return rope(q, k, *(angle[..., :half].repeat_interleave(2, -1) for angle in (cos, sin)))

        definition.apply_rotary_pos_emb_vision = interleaved
        try:
            return encode(self, images)
        finally:
            definition.apply_rotary_pos_emb_vision = rope

    patch.setattr(Encoder, "encode", wrong)


FAULTS: dict[str, tuple[str, Fault, str]] = {
    "rope interleave": ("plain", interleaved_rope, "vision rope"),
    "off-by-one slot": ("plain", off_by_one_slot, "kv_store"),
    "stale indices": ("plain", stale_indices, "topk_indices handed to sparse_mla"),
    "missing tail pool": ("plain", missing_tail, "index_select_prefill"),
    "wrong pool boundary": ("plain", wrong_pool_boundary, "index_pool"),
    "last chunk of the delta state": ("plain", last_delta_chunk, "gated_delta_prefill"),
    "swapped gate and up": ("plain", swapped_gate_and_up, "expert_gemm"),
    "nibble order": ("packed", nibble_order, "mxfp4_expert_gemm"),
    "swapped scale layout": ("packed", swapped_scale_layout, "mxfp4_expert_gemm"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    which, inject, operator = FAULTS[name]
    loaded: Loaded = request.getfixturevalue(which)
    inject(monkeypatch, loaded)
    culprit = check(loaded).culprit
    assert culprit is not None
    assert culprit.operator == operator, culprit
    if name == "swapped gate and up":
        assert "halves" in culprit.note


def test_an_error_does_not_reach_the_taps_behind_it(plain: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    off_by_one_slot(monkeypatch, plain)
    found = check(plain)
    wrong = {c.operator for p in found.passages for c in p.comparisons if not c.verdict.passes}
    assert wrong == {"kv_store"}


@pytest.mark.parametrize("which", ["plain", "packed"])
def test_sound_models_are_aligned(which: str, request: pytest.FixtureRequest) -> None:
    found = check(request.getfixturevalue(which), end_to_end=True)
    assert found.culprit is None, found.culprit
    seen = {c.tap for p in found.passages for c in p.comparisons}
    assert seen >= {
        "attention output",
        "delta state",
        "residual streams",
        "gate choice",
        "gate weights",
        "expert output",
    }
    assert seen >= {"embeddings", "indexer scores", "indexer choice", "logits"}
    # Of the tokens one by one; the others are cut into fewer.
    assert max(p.forwards for p in found.passages) >= 7
    assert all(c.verdict is not Verdict.UNSEEN for p in found.passages for c in p.comparisons)


def test_a_tap_that_our_side_never_passes_fails(plain: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    taps = plain.taps.taps
    renamed = replace(
        plain.taps,
        taps=lambda config, layer: tuple(
            replace(tap, native="gone:out") if tap.name == "delta output" else tap for tap in taps(config, layer)
        ),
    )
    monkeypatch.setattr(plain, "taps", renamed)
    culprit = check(plain).culprit
    assert culprit is not None and (culprit.verdict, culprit.tap) == (Verdict.UNSEEN, "delta output")


def test_equal_scores_are_a_tie_and_others_are_not() -> None:
    ours, theirs = torch.tensor([[0, 1, 4, 5, -1]]), torch.tensor([[0, 1, 6, 7, -1]])
    scores = torch.tensor([[9.0, 1.0, 2.0, 2.0]])
    assert compare_choice(ours, theirs, scores, 2, 1e-6)[0] is Verdict.TIE
    assert compare_choice(ours, theirs, scores + torch.tensor([0, 0, 0, 0.1]), 2, 1e-6)[0] is Verdict.DIVERGES
    assert compare_choice(theirs, theirs.flip(1), scores, 2, 0.0)[0] is Verdict.EQUAL
    # The tail has no score: leaving it out is never a tie.
    assert compare_choice(ours, torch.tensor([[0, 1, 4, 8, -1]]), scores, 2, 1.0)[0] is Verdict.DIVERGES


def test_values_are_judged_by_the_largest_and_nan_is_wrong() -> None:
    value = torch.tensor([1.0, -8.0])
    assert compare_values(value, value, 0.0)[0] is Verdict.EQUAL
    assert compare_values(value + torch.tensor([8e-6, 0]), value, 2e-6)[0] is Verdict.WITHIN
    assert compare_values(value + torch.tensor([8e-5, 0]), value, 2e-6)[0] is Verdict.DIVERGES
    assert compare_values(value * float("nan"), value, 1.0)[0] is Verdict.DIVERGES
    assert tolerance(64, torch.float32) == pytest.approx(52 * 2**-23)
    assert tolerance(64, torch.bfloat16) == pytest.approx(4 * 2**-7, rel=1e-3)
    assert accumulated([3.0, 4.0]) == 5.0


def test_the_reference_decodes_low_nibble_first() -> None:
    codes, scales = torch.zeros(1, 16, dtype=torch.uint8), torch.tensor([[128]], dtype=torch.uint8)
    codes[0, 0] = 0x9F
    found = decode_packed({"w.weight_packed": codes, "w.weight_scale": scales})["w.weight"]
    assert found[0, :3].tolist() == [-12.0, -1.0, 0.0]


def test_the_command_writes_json_and_fails_on_a_fault(
    plain: Loaded, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    monkeypatch.setattr("day0.align.alignment.Loaded", lambda folder, dtype: plain)
    wrong_pool_boundary(monkeypatch, plain)
    assert run(["align", str(plain.folder), "--json", "--markdown", str(page)], {}) == 1
    document = json.loads(capsys.readouterr().out)
    assert not document["aligned"]
    assert document["first_divergence"]["operator"] == "index_pool"
    assert document["upstream_kernels"] == [] and "transformers" in document["versions"]
    assert "index_pool" in page.read_text()


def test_accelerated_upstream_is_refused(monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path) -> None:
    from day0.align import alignment, reference

    fake = reference.Environment({"fla": "1.0"}, ("fla",))
    monkeypatch.setattr(alignment, "environment", lambda: fake)
    with pytest.raises(AlignError, match="fla installed"):
        alignment.align(tiny_checkpoint, "float32")
