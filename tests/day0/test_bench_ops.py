"""Operators on a GPU, as far as a machine without one can see: what is found, asked, judged and shown."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

from day0.bench.ops import families, gated_delta, measure, row, run, table
from day0.bench.ops.families import Selection, modules_with, name_of
from day0.bench.ops.row import OURS, Row, floor_of, from_json, times_as_fast
from day0.bench.ops.shape import Shape
from day0.cli import run as cli
from day0_kernels.gated_delta.reference import gated_delta_prefill
from tests.day0 import ops_family
from tests.day0.ops_family import CEILINGS

FUNCTIONS = run.Functions(
    ops_family.count, ops_family.shape, ops_family.peer, ops_family.ceilings, ops_family.usable, "fakes", "fakes.peers"
)


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package with two families, one of which cannot be imported, and an adapter for peers."""
    package = tmp_path / "fakes"
    (package / "peers").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "peers" / "__init__.py").touch()
    (package / "broken.py").write_text("import nowhere\ndef shapes(): ...\n")
    (package / "fake.py").write_text("def shapes(): ...\n")
    (package / "other.py").write_text("class Holder:\n    def shapes(self): ...\n")
    (package / "peers" / "adapter.py").write_text("from tests.day0.ops_family import peers as _peers\n")
    with (package / "peers" / "adapter.py").open("a") as file:
        file.write("def peers(operator, shape):\n    return _peers(operator, shape)\n")
    monkeypatch.syspath_prepend(tmp_path)
    return package


def made(options: run.OpsOptions, width: int = 300) -> tuple[run.Run, Callable[[], str]]:
    console = Console(record=True, width=width, file=open("/dev/null", "w"))  # noqa: SIM115
    return run.Run(options, console, FUNCTIONS), console.export_text


def test_families_are_the_modules_with_shapes() -> None:
    found = families.families()
    assert "day0.bench.ops.gated_delta" in found
    assert not [name for name in found if name.endswith((".shape", ".measure", ".run"))]
    assert {name_of(name) for name in modules_with("peers", families.PEERS)} >= {"flash_mla", "deep_gemm", "fla"}


def test_a_family_that_cannot_be_imported_is_found_all_the_same(fakes: Path) -> None:
    assert families.families("fakes") == ("fakes.broken", "fakes.fake")


@pytest.mark.parametrize(
    ("words", "family", "shape", "wanted"),
    [
        ((), "a.experts", "batch 1", True),
        (("experts",), "a.experts", "batch 1", True),
        (("experts",), "a.residual", "batch 1", False),
        (("batch 1",), "a.residual", "batch 1", True),
        (("batch 1",), "a.residual", "batch 2", False),
        (("hc_pre",), "a.residual", "batch 2", True),
        (("experts", "batch 1"), "a.residual", "batch 1", True),
        (("experts", "batch 1"), "a.experts", "batch 2", True),
    ],
)
def test_only_names_families_or_parts_of_shapes(words: tuple[str, ...], family: str, shape: str, wanted: bool) -> None:
    selection = Selection(words, ("a.experts", "a.residual"))
    assert (selection.family(family) and selection.shape(family, "hc_pre", shape)) == wanted


def test_the_floor_is_the_larger_term_at_its_own_rate() -> None:
    assert floor_of(4e9, 1e9, "bf16", CEILINGS) == (pytest.approx(1000.0), "bytes")
    assert floor_of(4e6, 8e11, "bf16", CEILINGS) == (pytest.approx(1000.0), "flops")
    assert floor_of(4e6, 8e11, "fp8", CEILINGS) == (pytest.approx(500.0), "flops")


def test_share_rate_and_ratio_follow_from_the_times() -> None:
    ours = Row("f", "o", "s", OURS, flops=2e9, floor_us=5.0, us=20.0)
    peer = Row("f", "o", "s", "other 1.0", us=30.0)
    assert (ours.share, ours.tflops, peer.tflops) == (25.0, 100.0, None)
    assert times_as_fast(ours, peer) == 1.5
    assert times_as_fast(ours, Row("f", "o", "s", "other 1.0", wrong="no")) is None
    assert from_json(json.loads(json.dumps(ours.to_json()))) == ours


def test_lines_say_floor_share_error_ratio_and_what_was_wrong() -> None:
    ours = Row("f", "hc_pre", "128 tokens", OURS, flops=2e9, floor_us=5.0, us=20.0, error=1.5e-3)
    assert table.line_of(ours).split() == ["hc_pre", "128", "tokens", "20.0", "5.0", "bytes", "25.0", "100", "1.5e-03"]
    peer = Row("f", "hc_pre", "128 tokens", "x 1", floor_us=5.0, us=30.0, error=1e-3, note="bf16", mode="eager")
    assert table.line_of(peer, ours).endswith("1.0e-03  without a graph  ours 1.50x as fast  (bf16)")
    assert "not timed: error 1.0" in table.line_of(Row("f", "o", "s", OURS, wrong="error 1.0\x1b above"))
    assert "\x1b" not in table.line_of(Row("f", "o", "s", OURS, wrong="error 1.0\x1b above"))


class TestMeasured:
    """One implementation on the CPU: only the clock and the poison are not the GPU's."""

    about = Row("f", "o", "s", OURS)

    @pytest.fixture(autouse=True)
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(measure, "poison", lambda size_bytes: None)
        monkeypatch.setattr(measure, "median_us", lambda calls: 8.0)

    def shape(self, call: Callable[[], Any], *, limit: float = 1e-2, checked: Any = None) -> Shape:
        def error(out: Any) -> float:
            return float((out - 1).abs().max())

        return Shape("o", "s", [call], 4e6, error, limit, checked=checked)

    def test_what_is_right_has_a_time(self) -> None:
        found = measure.measured(self.about, self.shape(lambda: torch.ones(3)), CEILINGS, True, graph=True)
        assert (found.us, found.floor_us, found.error, found.wrong) == (8.0, pytest.approx(1.0), 0.0, None)

    def test_a_check_alone_has_none(self) -> None:
        found = measure.measured(self.about, self.shape(lambda: torch.ones(3)), CEILINGS, False, graph=True)
        assert (found.us, found.wrong, found.error) == (None, None, 0.0)

    @pytest.mark.parametrize("value", [2.0, math.nan])
    def test_what_is_wrong_has_no_time(self, value: float) -> None:
        shape = self.shape(lambda: torch.full((3,), value))
        found = measure.measured(self.about, shape, CEILINGS, True, graph=True)
        assert found.us is None and found.wrong is not None and "above 1.0e-02" in found.wrong

    def test_what_is_never_written_is_seen(self) -> None:
        def nan(out: Tensor) -> float:
            return float(out.isnan().sum())

        shape = Shape("o", "s", [lambda: torch.empty(3)], 4e6, nan, 0.0)
        found = measure.measured(self.about, shape, CEILINGS, True, graph=True)
        assert found.us is None and found.error == 3.0
        assert not torch.are_deterministic_algorithms_enabled()

    def test_other_bits_in_a_second_run_are_wrong(self) -> None:
        values = iter((1.0, 1.001))
        found = measure.measured(
            self.about, self.shape(lambda: torch.full((3,), next(values))), CEILINGS, True, graph=True
        )
        assert found.us is None and found.wrong == "other bits in a second run"

    def test_a_call_that_changes_its_inputs_is_checked_on_copies(self) -> None:
        state = torch.zeros(3)
        shape = self.shape(lambda: state.add_(1), checked=lambda: state.clone().add_(1))
        assert measure.measured(self.about, shape, CEILINGS, True, graph=True).us == 8.0
        assert measure.measured(self.about, self.shape(lambda: state.add_(1).clone()), CEILINGS, True, graph=True).wrong

    def test_only_a_peer_may_run_without_a_graph(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(calls: Any) -> float:
            raise RuntimeError("not permitted when the stream is capturing")

        monkeypatch.setattr(measure, "median_us", refuse)
        monkeypatch.setattr(measure, "eager_median_us", lambda calls: 9.0)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        shape = self.shape(lambda: torch.ones(3))
        found = measure.measured(Row("f", "o", "s", "other 1"), shape, CEILINGS, True, graph=True)
        assert (found.us, found.mode) == (9.0, "eager")
        with pytest.raises(RuntimeError, match="capturing"):
            measure.measured(self.about, shape, CEILINGS, True, graph=True)


def test_a_run_goes_on_after_whatever_breaks_and_shows_peers_under_ours(fakes: Path) -> None:
    bench, text = made(run.OpsOptions())
    bench.measure()
    rows = [(found.shape, found.who, found.us, found.wrong) for found in bench.rows]
    version = next(who for _, who, _, _ in rows if who.startswith("typer"))
    assert rows == [
        ("all shapes", OURS, None, "ImportError: no module named triton"),
        ("batch 0", OURS, 10.0, None),
        ("batch 0", "other 1.2 fast", 15.0, None),
        ("batch 0", version, None, "RuntimeError: all tensors must be on CUDA"),
        ("shape 2", OURS, None, "the process ended with exit code 9"),
        ("batch 2", OURS, None, "error 1.0e+00 above 1.0e-02"),
        ("batch 2", "other 1.2 fast", 15.0, None),
        ("batch 2", version, None, "RuntimeError: all tensors must be on CUDA"),
    ]
    assert version.endswith(" refusing") and version.split()[1][0].isdigit()
    lines = text().splitlines()
    assert "ours 1.50x as fast" in next(line for line in lines if "other 1.2 fast" in line)


def test_every_row_is_told_of_as_soon_as_it_is_there(fakes: Path) -> None:
    bench, _ = made(run.OpsOptions(only=("fake",), peers=False))
    counts: list[int] = []
    bench.kept = lambda rows: counts.append(len(rows))
    bench.measure()
    assert counts == [1, 2, 3]
    assert bench.found == CEILINGS


def test_warm_checks_the_same_and_times_nothing(fakes: Path) -> None:
    bench, _ = made(run.OpsOptions(warm=True, workers=2))
    bench.warm()
    names = [(found.shape, found.who.split()[0]) for found in bench.rows]
    assert sorted(name for name in names if name[1] != "typer") == [
        ("all shapes", OURS),
        ("batch 0", OURS),
        ("batch 0", "other"),
        ("batch 2", OURS),
        ("batch 2", "other"),
        ("shape 2", OURS),
    ]
    # What raises at its first shape is not built for the others.
    assert len(names) == 7
    assert not [found for found in bench.rows if found.us is not None]


def test_without_peers_and_with_only_one_shape(fakes: Path) -> None:
    bench, _ = made(run.OpsOptions(only=("batch 0",), peers=False))
    bench.measure()
    assert [found.shape for found in bench.rows if found.wrong is None] == ["batch 0"]
    assert {found.who for found in bench.rows} == {OURS}


def test_after_the_seconds_no_shape_is_begun(fakes: Path) -> None:
    bench, text = made(run.OpsOptions(only=("fake",), seconds=0.0))
    bench.measure()
    assert bench.rows == []
    assert "not begun: fake, shapes 1 to 3" in text()


def test_the_document_has_device_ceilings_and_rows() -> None:
    found = Row("f", "o", "s", OURS, floor_us=5.0, us=20.0)
    document = json.loads(json.dumps(run.document({"device": "NVIDIA H200"}, CEILINGS, [found], 12.34)))
    assert document["about"] == {"device": "NVIDIA H200"}
    assert document["ceilings"]["copy_bytes_per_second"] == 4e12
    assert document["seconds"] == 12.3
    assert [row.from_json(one) for one in document["rows"]] == [found]
    assert document["rows"][0]["share_of_floor"] == 25.0


def test_without_a_gpu_the_command_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli(["bench", "ops"], {}) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"no GPU: torch {torch.__version__} sees no CUDA device")
    assert captured.out == ""


def test_a_bad_time_limit_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["bench", "ops", "--seconds", "-1"], {}) == 2
    assert "--seconds: above 0, got -1.0" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("gates", ["KDA", "KDA bf16 gates", "GDN"])
def test_the_recurrence_the_gpu_is_held_against_is_the_references(gates: gated_delta.Gates) -> None:
    torch.manual_seed(0)
    bounds = [0, 3, 4, 10]
    inputs = gated_delta.delta_inputs(10, 3, gates, device="cpu")
    wanted, wanted_states = gated_delta.recurrence(inputs, bounds)
    wide: dict[str, Tensor] = {
        name: x if name == "state_slots" else x.float().contiguous() for name, x in inputs.items()
    }
    cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
    out = gated_delta_prefill(
        **wide, cu_seqlens=cu_seqlens, scale=gated_delta.SCALE, l2norm_eps=gated_delta.L2NORM_EPS, chunk_size=16
    )
    assert gated_delta.relative(out, wanted) < 1e-5
    assert gated_delta.relative(wide["state"], wanted_states) < 1e-5
