"""Discovery from folders and from an installed distribution, choice by priority, and refusals that say why."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from day0_kernels import registry
from day0_kernels.registry import BackendRefused, UnknownOperator, resolve
from day0_kernels.spec import Backend

EXPECTED = {
    "kv_store",
    "index_pool",
    "index_select_prefill",
    "index_select_decode",
    "sparse_mla_prefill",
    "sparse_mla_decode",
    "sparse_mla_sinks_prefill",
    "sparse_mla_sinks_decode",
    "short_conv_prefill",
    "short_conv_decode",
    "gated_delta_prefill",
    "gated_delta_decode",
    "delta_gates",
    "gated_norm",
    "hc_pre",
    "hc_pre_norm",
    "hc_post",
    "attention_residual",
    "latent_store_fp8",
    "index_key_store_fp8",
    "latent_and_key_store_fp8",
    "expert_gemm",
    "mxfp4_expert_gemm",
    "mxfp4_to_fp8",
    "mxfp4_fp8_expert_gemm",
    "fp8_quantise",
    "fp8_expert_gemm",
    "fp8_expert_product",
    "fp8_index_select_prefill",
    "fp8_index_select_decode",
    "fp8_sparse_mla_prefill",
    "fp8_sparse_mla_decode",
    "paged_mla_decode",
    "paged_gqa_decode",
    "select_experts",
    "permute_rows",
    "unpermute_rows",
    "swiglu",
    "swiglu_fp8",
}

PLUGIN = """
from day0_kernels.spec import Backend, ScratchSpec

BACKEND = Backend("acme", priority={priority}, devices=("cpu",), dtypes=("float32",),
                  scratch={{"kv_store": (ScratchSpec("sums", ("T", "D"), "float32"),)}})


def kv_store(rows, cache, slot_mapping):
    for t, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            cache[slot] = rows[t]


def refusal(operator, device, dtype, sizes):
    return f"D must be at most 64, is {{sizes['D']}}" if sizes.get("D", 0) > 64 else None
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution `acme-kernels` as an installer leaves it: a module, metadata, an entry point."""
    (tmp_path / "acme_kernels.py").write_text(PLUGIN.format(priority=10))
    info = tmp_path / "acme_kernels-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-kernels\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[day0.kernels]\nacme = acme_kernels\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "acme_kernels", raising=False)
    importlib.invalidate_caches()
    return tmp_path


def _module(folder: Path, text: str) -> None:
    (folder / "acme_kernels.py").write_text(text)
    sys.modules.pop("acme_kernels", None)
    importlib.invalidate_caches()


def test_every_operator_has_a_reference_that_serves_everywhere() -> None:
    assert {operator.name for operator in registry.operators()} == EXPECTED
    for name in EXPECTED:
        for device, dtype in (("cpu", torch.float32), ("cpu", torch.bfloat16), ("cuda", torch.bfloat16)):
            assert resolve(name, device, dtype, "reference").operator.name == name


def test_every_folder_is_complete() -> None:
    root = Path(registry.__file__).parent
    folders = [spec.parent for spec in root.glob("*/spec.py")]
    assert len(folders) == 22
    for folder in folders:
        assert {"__init__.py", "spec.py", "reference.py", "README.md"} <= {path.name for path in folder.iterdir()}
        readme = (folder / "README.md").read_text()
        for operator in importlib.import_module(f"day0_kernels.{folder.name}.spec").OPERATORS:
            assert operator.name in readme
            for word in (*(tensor.name for tensor in operator.tensors), *operator.scalars):
                assert f"`{word}" in readme, f"{folder.name}/README.md does not say {word}"


def test_unknown_names_are_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownOperator, match=r"'softmax' is not declared, known are attention_residual, .*kv_store"):
        resolve("softmax", "cpu", torch.float32)
    with pytest.raises(
        BackendRefused, match=r"kv_store: backend 'cutlass' refused: no such backend, known are reference"
    ):
        resolve("kv_store", "cpu", torch.float32, "cutlass")


def test_an_installed_distribution_adds_a_backend(plugin: Path) -> None:
    found = resolve("kv_store", "cpu", torch.float32)
    assert found.backend == "acme"
    assert [scratch.name for scratch in found.scratch] == ["sums"]
    cache = torch.zeros(4, 2)
    found.fn(torch.ones(2, 2), cache, torch.tensor([3, -1], dtype=torch.int32))
    assert cache.sum(1).tolist() == [0, 0, 0, 2]
    assert resolve("kv_store", "cpu", torch.float32, "reference").backend == "reference"
    assert set(registry.backends("kv_store")) == {"reference", "triton", "acme"}


@pytest.mark.parametrize(
    ("name", "device", "dtype", "sizes", "reason"),
    [
        ("kv_store", "cuda", torch.float32, {}, "device cuda is not among cpu"),
        ("kv_store", "cpu", torch.bfloat16, {}, "dtype bfloat16 is not among float32"),
        ("kv_store", "cpu", torch.float32, {"D": 65}, "D must be at most 64, is 65"),
        ("hc_post", "cpu", torch.float32, {}, "does not implement this operator"),
    ],
)
def test_a_refusal_says_why_and_another_backend_serves(
    plugin: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    device: str,
    dtype: torch.dtype,
    sizes: dict[str, int],
    reason: str,
) -> None:
    monkeypatch.setattr(registry, "_told", set())
    with pytest.raises(BackendRefused) as caught:
        resolve(name, device, dtype, "acme", sizes)
    assert (caught.value.operator, caught.value.backend, caught.value.reason) == (name, "acme", reason)
    with caplog.at_level(logging.INFO, logger="day0_kernels.registry"):
        assert resolve(name, device, dtype, sizes=sizes).backend == "reference"
        assert resolve(name, device, dtype, sizes=sizes).backend == "reference"
    told = [record.getMessage() for record in caplog.records if "'acme'" in record.getMessage()]
    assert told == [f"{name}: backend 'acme' refused: {reason}"]
    verdicts = {(v.operator, v.backend): v.reason for v in registry.report(device, dtype, sizes)}
    assert verdicts[name, "acme"] == reason
    assert verdicts[name, "reference"] is None
    assert len(verdicts) == sum(len(registry.backends(operator.name)) for operator in registry.operators())


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import no_such_module", "import failed: ModuleNotFoundError: No module named 'no_such_module'"),
        ("raise OSError('no device')", "import failed: OSError: no device"),
        ("def kv_store(): ...", "its module has no BACKEND of type day0_kernels.spec.Backend"),
        (
            "from day0_kernels.spec import Backend\nBACKEND = Backend('other', 1)\ndef kv_store(): ...",
            "its BACKEND is called 'other'",
        ),
    ],
)
def test_a_broken_distribution_refuses_and_breaks_nothing(plugin: Path, text: str, reason: str) -> None:
    _module(plugin, text)
    assert resolve("kv_store", "cpu", torch.float32).backend == "reference"
    with pytest.raises(BackendRefused) as caught:
        resolve("kv_store", "cpu", torch.float32, "acme")
    assert caught.value.reason == reason


def test_equal_priorities_must_be_told_apart(plugin: Path) -> None:
    _module(plugin, PLUGIN.format(priority=0))
    with pytest.raises(BackendRefused, match="same priority 0 as 'reference': name one of them"):
        resolve("kv_store", "cpu", torch.float32)
    assert resolve("kv_store", "cpu", torch.float32, "acme").backend == "acme"


def test_a_distribution_may_not_take_a_name_of_ours(plugin: Path) -> None:
    (plugin / "acme_kernels-1.0.dist-info" / "entry_points.txt").write_text(
        "[day0.kernels]\nreference = acme_kernels\n"
    )
    with pytest.raises(ImportError, match="entry point 'reference' of distribution acme-kernels takes the name"):
        resolve("kv_store", "cpu", torch.float32)


def test_nobody_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    from day0_kernels.kv_store import reference

    monkeypatch.setattr(reference, "BACKEND", Backend("reference", 0, devices=("xpu",)))
    with pytest.raises(BackendRefused, match="backend 'any' refused: reference: device cpu is not among xpu"):
        resolve("kv_store", "cpu", torch.float32)


def test_import_brings_neither_triton_nor_transformers() -> None:
    """Beyond what torch itself has loaded."""
    program = """
import sys, torch
before = set(sys.modules)
from day0_kernels import comparison, inputs, registry, row_invariant, spec, workspace
for operator in registry.operators():
    registry.resolve(operator.name, "cpu", torch.float32)
brought = {name.partition(".")[0] for name in set(sys.modules) - before}
assert not brought & {"triton", "transformers", "numpy"}, brought
"""
    root = Path(registry.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_triton_is_taken_on_a_gpu_and_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendRefused, match="kv_store: backend 'triton' refused: this process sees no CUDA device"):
        resolve("kv_store", "cuda", torch.bfloat16, "triton")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert resolve("kv_store", "cuda", torch.bfloat16).backend == "reference"
    with pytest.raises(BackendRefused, match=r"compute capability 8\.0 is below 8\.9, which e4m3 needs"):
        resolve("kv_store", "cuda", torch.bfloat16, "triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert resolve("kv_store", "cuda", torch.bfloat16).backend == "triton"
    with pytest.raises(BackendRefused, match="M must be 2 or 4, is 3"):
        resolve("hc_post", "cuda", torch.bfloat16, "triton", {"M": 3})
    with pytest.raises(BackendRefused, match="dtype float32 is not among bfloat16"):
        resolve("mxfp4_expert_gemm", "cuda", torch.float32, "triton")
