"""`day0 quantize` on the tiny checkpoint and on its stacked twin: what is written, what is kept, what is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from day0 import expert_shards
from day0.cli import run
from day0.expert_names import expert_matrices
from day0.quantize import quantize_checkpoint
from day0_kernels.comparison import same_bits
from day0_kernels.mxfp4 import decode, encode
from llm_svc.formats.mxfp4 import PackedFormat, find_experts, read_experts
from llm_svc.formats.quantization import check_compressed_tensors
from svc_common.checkpoint import INDEX_NAME
from svc_common.checkpoint_errors import CheckpointError
from svc_common.errors import InvalidArgument

LAYER = "model.language_model.layers.2.mlp.experts"
EXPERTS, INNER, HIDDEN = 8, 32, 64


def _load(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, from the files its index names."""
    weight_map = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
    tensors = {}
    for file in sorted(set(weight_map.values())):
        held = load_file(folder / file)
        assert {name for name, owner in weight_map.items() if owner == file} == set(held)
        tensors |= held
    return tensors


def _digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def quantised(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The tiny checkpoint quantised by the command, and what it printed."""
    folder = tmp_path_factory.mktemp("quantised") / "checkpoint"
    return folder, quantize_checkpoint(tiny_checkpoint, folder).as_dict()


def test_the_routed_experts_decode_to_what_the_encoder_says(
    tiny_checkpoint: Path, quantised: tuple[Path, dict[str, Any]]
) -> None:
    source, written = _load(tiny_checkpoint), _load(quantised[0])
    found = find_experts(written)
    assert [(layer.format, layer.experts) for layer in found] == [(PackedFormat.COMPRESSED_TENSORS, EXPERTS)] * 3
    for layer in found:
        experts = read_experts(layer, written.__getitem__)
        for expert in range(EXPERTS):
            gate, up, down = (
                source[f"{layer.prefix}.{expert}.{name}.weight"] for name in ("gate_proj", "up_proj", "down_proj")
            )
            for weight, original in ((experts.gate_up, torch.cat((gate, up))), (experts.down, down)):
                decoded = decode(weight.codes[expert], weight.scales[expert])
                assert same_bits(decoded, decode(*encode(original)))
                assert (decoded - original).norm() / original.norm() < 0.13


def test_everything_else_is_kept_to_the_byte(tiny_checkpoint: Path, quantised: tuple[Path, dict[str, Any]]) -> None:
    source, written = _load(tiny_checkpoint), _load(quantised[0])
    kept = {name for name in source if not expert_matrices(name, tuple(source[name].shape))}
    assert len(source) - len(kept) == 3 * EXPERTS * 3
    assert any("shared_experts" in name for name in kept)
    assert {name for name in written if not name.endswith(("weight_packed", "weight_scale"))} == kept
    assert all(same_bits(source[name], written[name]) for name in kept)
    before, after = _digests(tiny_checkpoint), _digests(quantised[0])
    assert before.keys() == after.keys()
    same = {name for name in before if before[name] == after[name]}
    # Files without experts come out as the safetensors library wrote them.
    assert {"tokenizer.json", "chat_template.jinja", "preprocessor_config.json", "generation_config.json"} <= same
    assert {"model-00001-of-00007.safetensors", "model-00007-of-00007.safetensors"} <= same
    assert not {"config.json", INDEX_NAME, "model-00002-of-00007.safetensors"} & same


def test_the_files_are_as_the_safetensors_library_writes_them(
    quantised: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Order, alignment and header included; so a loader that maps files finds every tensor aligned."""
    for file in sorted(quantised[0].glob("*.safetensors")):
        save_file(load_file(file), tmp_path / file.name, metadata={"format": "pt"})
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name


def test_the_config_and_the_index_say_so(tiny_checkpoint: Path, quantised: tuple[Path, dict[str, Any]]) -> None:
    folder, report = quantised
    config = json.loads((folder / "config.json").read_text())
    added = config.pop("quantization_config")
    assert config == json.loads((tiny_checkpoint / "config.json").read_text())
    check_compressed_tensors(added)
    assert added["config_groups"]["group_0"]["targets"] == [r"re:.*\.experts\.\d+\.(gate|up|down)_proj$"]
    index = json.loads((folder / INDEX_NAME).read_text())
    sizes = sum(tensor.nbytes for tensor in _load(folder).values())
    assert index["metadata"]["total_size"] == report["bytes_after"] == sizes
    assert index["metadata"]["total_parameters"] == 596_804
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}


def test_the_report_has_errors_and_bytes_of_each_layer(
    tiny_checkpoint: Path, quantised: tuple[Path, dict[str, Any]]
) -> None:
    report = quantised[1]
    source = _load(tiny_checkpoint)
    assert report["bytes_before"] == sum(tensor.nbytes for tensor in source.values())
    layer = report["layers"][LAYER]
    weights = [source[name] for name in source if name.startswith(LAYER)]
    changes = [decode(*encode(weight)) - weight for weight in weights]
    squared = [sum(float(t.double().square().sum()) for t in group) for group in (changes, weights)]
    assert layer["relative_error"] == pytest.approx((squared[0] / squared[1]) ** 0.5, rel=1e-9)
    elements = EXPERTS * 3 * INNER * HIDDEN
    assert (layer["experts"], layer["bytes_before"], layer["bytes_after"]) == (8, 4 * elements, elements * 17 // 32)


def test_a_second_run_writes_the_same_bytes(
    tiny_checkpoint: Path, quantised: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when a matrix takes many steps, and a copy too."""
    monkeypatch.setattr(expert_shards, "_ROWS_ELEMENTS", 7 * HIDDEN)
    monkeypatch.setattr(expert_shards, "_COPY_BYTES", 1000)
    (tmp_path / "again").mkdir()
    quantize_checkpoint(tiny_checkpoint, tmp_path / "again")
    assert _digests(tmp_path / "again") == _digests(quantised[0])
    assert [path.name for path in tmp_path.iterdir()] == ["again"]
    (tmp_path / "plain").mkdir()
    assert (tmp_path / "again").stat().st_mode == (tmp_path / "plain").stat().st_mode


def _stacked(source: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The same experts as upstream's modules hold them: `[E, 2I, H]` with the gate first, and `[E, H, I]`."""
    tensors = {name: tensor for name, tensor in source.items() if ".mlp.experts." not in name}
    for prefix in sorted({name.rsplit(".", 3)[0] for name in source if ".mlp.experts." in name}):
        gate, up, down = (
            torch.stack([source[f"{prefix}.{e}.{name}.weight"] for e in range(EXPERTS)]).to(dtype)
            for name in ("gate_proj", "up_proj", "down_proj")
        )
        tensors |= {f"{prefix}.gate_up_proj": torch.cat((gate, up), 1), f"{prefix}.down_proj": down}
    return tensors


def _folder(path: Path, tiny: Path, tensors: dict[str, Tensor]) -> Path:
    """A checkpoint of one file, without an index."""
    path.mkdir()
    shutil.copy(tiny / "config.json", path)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stacked_experts_of_one_file_come_out_one_by_one(
    tiny_checkpoint: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    source = _load(tiny_checkpoint)
    folder = _folder(tmp_path / "stacked", tiny_checkpoint, _stacked(source, dtype))
    report = quantize_checkpoint(folder, tmp_path / "out").as_dict()
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}
    for name in source:
        if expert_matrices(name, tuple(source[name].shape)):
            codes, scales = encode(source[name].to(dtype))
            module = name.removesuffix(".weight")
            assert same_bits(written[f"{module}.weight_packed"], codes)
            assert same_bits(written[f"{module}.weight_scale"], scales)
    assert report["layers"][LAYER]["experts"] == EXPERTS
    assert report["layers"][LAYER]["bytes_before"] == EXPERTS * 3 * INNER * HIDDEN * dtype.itemsize


def test_no_read_is_larger_than_its_bound(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory does not grow with a tensor: stacked experts and all else are read in pieces."""
    folder = _folder(tmp_path / "stacked", tiny_checkpoint, _stacked(_load(tiny_checkpoint), torch.float32))
    sizes: list[int] = []
    read = expert_shards._read

    def counted(file: Any, count: int, path: Path) -> bytearray:
        sizes.append(count)
        return read(file, count, path)

    monkeypatch.setattr(expert_shards, "_read", counted)
    monkeypatch.setattr(expert_shards, "_ROWS_ELEMENTS", 3 * HIDDEN)
    monkeypatch.setattr(expert_shards, "_COPY_BYTES", 1000)
    report = quantize_checkpoint(folder, tmp_path / "out")
    assert sum(sizes) == report.bytes_before
    assert max(sizes) <= 1000


def test_progress_counts_every_byte_once(tiny_checkpoint: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = quantize_checkpoint(tiny_checkpoint, tmp_path / "out", progress=lambda *step: seen.append(step))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (report.bytes_before, report.bytes_before)


# Refusals. None leaves anything behind.


def _drop(tensors: dict[str, Tensor], name: str) -> None:
    del tensors[name]


FIRST = f"{LAYER}.0"
REFUSED: list[tuple[Callable[[dict[str, Tensor]], object], str]] = [
    (lambda t: t.update({f"{FIRST}.down_proj.weight": torch.ones(64, 40)}), r"0\.down_proj\.weight.*\[64, 40\]"),
    (
        lambda t: t.update({f"{FIRST}.up_proj.weight": t[f"{FIRST}.up_proj.weight"].to(torch.float8_e4m3fn)}),
        r"0\.up_proj\.weight.*F8_E4M3",
    ),
    (lambda t: t[f"{FIRST}.up_proj.weight"][3].fill_(torch.nan), r"experts\.0\.up_proj: a value is not finite"),
    (lambda t: t[f"{FIRST}.up_proj.weight"][3].fill_(torch.inf), r"experts\.0\.up_proj: a value is not finite"),
    (lambda t: _drop(t, f"{FIRST}.up_proj.weight"), r"experts\.0\.up_proj is missing"),
    (lambda t: _drop(t, f"{LAYER}.7.down_proj.weight"), r"experts\.7\.down_proj is missing"),
    (
        lambda t: t.update({f"{LAYER}.3.up_proj.weight": torch.ones(64, 64)}),
        r"experts\.3\.up_proj is \[64, 64\], .*needs",
    ),
    (
        lambda t: t.update({f"{LAYER}.gate_up_proj": torch.ones(8, 64, 64)}),
        r"experts\.0\.(gate|up)_proj is in the checkpoint twice",
    ),
]


@pytest.mark.parametrize(("break_it", "message"), REFUSED)
def test_experts_that_cannot_be_mxfp4_are_refused_by_name(
    tiny_checkpoint: Path, tmp_path: Path, break_it: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    tensors = {name: tensor for name, tensor in _load(tiny_checkpoint).items() if name.startswith(LAYER)}
    break_it(tensors)
    folder = _folder(tmp_path / "source", tiny_checkpoint, tensors)
    with pytest.raises(InvalidArgument, match=message):
        quantize_checkpoint(folder, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_transposed_stacked_experts_are_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """gpt_oss has these names with rows and columns the other way round, and its gate and up interleaved."""
    tensors = _stacked(_load(tiny_checkpoint), torch.bfloat16)
    turned = {name: t.transpose(1, 2) if name.startswith(LAYER) and t.dim() == 3 else t for name, t in tensors.items()}
    folder = _folder(tmp_path / "source", tiny_checkpoint, turned)
    with pytest.raises(InvalidArgument, match=r"experts\.0\.down_proj is \[32, 64\], .* needs \[64, 32\]"):
        quantize_checkpoint(folder, tmp_path / "out")


def test_a_checkpoint_without_experts_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = _folder(tmp_path / "source", tiny_checkpoint, {"mlp.shared_experts.up_proj.weight": torch.ones(32, 32)})
    with pytest.raises(InvalidArgument, match="no tensor is a routed expert's weight"):
        quantize_checkpoint(folder, tmp_path / "out")


def _broken_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    change(index)
    (folder / INDEX_NAME).write_text(json.dumps(index))


BROKEN: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: (f / "config.json").unlink(), "config.json"),
    (lambda f: (f / "config.json").write_text("[]"), "config.json is no JSON object"),
    (lambda f: (f / "config.json").write_text('{"quantization_config": {}}'), "is quantised already"),
    (lambda f: (f / "config.json").write_text('{"text_config": {"quantization_config": {}}}'), "is quantised already"),
    (lambda f: (f / INDEX_NAME).unlink(), f"has neither {INDEX_NAME} nor model.safetensors"),
    (lambda f: (f / INDEX_NAME).write_text("{}"), "is no weight index"),
    (lambda f: (f / "model-00003-of-00007.safetensors").unlink(), "missing: model-00003-of-00007.safetensors"),
    (
        lambda f: (f / "model-00003-of-00007.safetensors").write_bytes(b"\x08"),
        "model-00003-of-00007.safetensors: 1 bytes",
    ),
    (
        lambda f: _broken_index(f, lambda i: i["weight_map"].pop("lm_head.weight")),
        "'lm_head.weight': the index gives it to no",
    ),
    (
        lambda f: _broken_index(f, lambda i: i["weight_map"].update({"x": "model-00001-of-00007.safetensors"})),
        "model-00001-of-00007.safetensors: tensor 'x': the index gives it to this file",
    ),
    (
        lambda f: _broken_index(f, lambda i: i["weight_map"].update({"lm_head.weight": "../x.safetensors"})),
        "is no .safetensors file beside it",
    ),
]


@pytest.mark.parametrize(("break_it", "message"), BROKEN)
def test_a_broken_checkpoint_is_refused_by_file(
    tiny_checkpoint: Path, tmp_path: Path, break_it: Callable[[Path], object], message: str
) -> None:
    shutil.copytree(tiny_checkpoint, tmp_path / "source")
    break_it(tmp_path / "source")
    with pytest.raises((InvalidArgument, CheckpointError), match=message):
        quantize_checkpoint(tmp_path / "source", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# The command.


def test_the_command_reports_as_json(tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["quantize", str(tiny_checkpoint), str(tmp_path / "out"), "--json"], {}) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["format"] == "mxfp4-pack-quantized"
    assert {layer["experts"] for layer in report["layers"].values()} == {EXPERTS}
    assert (tmp_path / "out" / "config.json").is_file()


def test_the_command_shows_a_table_and_refuses_a_full_folder(
    tiny_checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["quantize", str(tiny_checkpoint), str(tmp_path / "out")]
    assert run(arguments, {}) == 0
    shown = capsys.readouterr()
    assert "2,387,312 bytes before" in " ".join(shown.out.split())
    before = _digests(tmp_path / "out")
    assert run(arguments, {}) == 2
    assert "is not empty" in capsys.readouterr().err
    assert _digests(tmp_path / "out") == before
    assert run(["quantize", str(tmp_path / "out"), str(tmp_path / "other")], {}) == 1
    assert "is quantised already" in capsys.readouterr().err
