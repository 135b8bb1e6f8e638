"""The arena: sized by the hungriest, shared by all, bounded, and never lent twice at once."""

from __future__ import annotations

import pytest
import torch

from day0_kernels.registry import Resolved, operator
from day0_kernels.spec import ScratchSpec
from day0_kernels.workspace import Reservation, Workspace, WorkspaceError

SIZES = {"T": 100, "H": 4}


def _resolved(name: str, *scratch: ScratchSpec) -> Resolved:
    return Resolved(operator(name), "hand", lambda: None, scratch)


SMALL = _resolved("kv_store", ScratchSpec("counts", ("T",), "int32"))
LARGE = _resolved("hc_pre", ScratchSpec("sums", ("T", "H"), "float32"), ScratchSpec("ids", ("T", "2 * H + 1"), "int64"))


def test_one_allocation_as_large_as_the_hungriest() -> None:
    workspace = Workspace("cpu", [SMALL, LARGE], SIZES)
    # 100 * 4 * 4 B and 100 * 9 * 8 B, each rounded up to 256 B.
    assert workspace.capacity_bytes == 1792 + 7424
    assert workspace.high_water_bytes == 0
    with workspace.lease("kv_store", SIZES) as views:
        assert views["counts"].shape == (100,)
        assert views["counts"].dtype == torch.int32
        first = views["counts"].data_ptr()
    assert workspace.high_water_bytes == 512
    with workspace.lease("hc_pre", {"T": 3, "H": 4}) as views:
        assert views["sums"].data_ptr() == first
        assert views["ids"].shape == (3, 9)
        assert views["ids"].data_ptr() % 8 == 0
        views["sums"].fill_(1)
        views["ids"].fill_(2)
        assert bool((views["sums"] == 1).all())
    assert workspace.high_water_bytes == 512
    with workspace.lease("hc_pre", SIZES):
        pass
    with workspace.lease("kv_store", SIZES):
        pass
    assert workspace.high_water_bytes == 1792 + 7424


def test_poison_fills_every_view() -> None:
    workspace = Workspace("cpu", [LARGE], SIZES, poison=True)
    for _ in range(2):
        with workspace.lease("hc_pre", SIZES) as views:
            assert bool(views["sums"].isnan().all())
            assert bool((views["ids"] == torch.iinfo(torch.int64).max).all())
            views["sums"].zero_()
            views["ids"].zero_()


def test_refusals() -> None:
    workspace = Workspace("cpu", [SMALL, LARGE], SIZES)
    with pytest.raises(WorkspaceError, match=r"hc_post declared no scratch here, known are \['hc_pre', 'kv_store'\]"):
        workspace.lease("hc_post", SIZES).__enter__()
    with pytest.raises(WorkspaceError, match="kv_store needs 768 bytes of scratch, 512 are reserved for it"):
        workspace.lease("kv_store", {"T": 129, "H": 4}).__enter__()
    with (
        workspace.lease("kv_store", SIZES),
        pytest.raises(WorkspaceError, match="hc_pre asked for scratch while kv_store holds the workspace"),
    ):
        workspace.lease("hc_pre", SIZES).__enter__()
    with workspace.lease("hc_pre", SIZES):
        pass


def test_an_error_inside_gives_the_workspace_back() -> None:
    workspace = Workspace("cpu", [SMALL], SIZES)
    with pytest.raises(ValueError, match="inside"), workspace.lease("kv_store", SIZES):
        raise ValueError("inside")
    with workspace.lease("kv_store", SIZES):
        pass


def test_no_scratch_needs_no_memory() -> None:
    workspace = Workspace("cpu", [_resolved("kv_store")], SIZES)
    assert workspace.capacity_bytes == 0
    with workspace.lease("kv_store", SIZES) as views:
        assert views == {}


def test_reserved_scratch_shares_the_arena_under_its_own_sizes() -> None:
    reserved = {"experts": Reservation((ScratchSpec("fp8", ("E", "T"), "uint8"),), {"E": 3, "T": 9000})}
    workspace = Workspace("cpu", [SMALL], SIZES, reserved=reserved, poison=True)
    assert workspace.capacity_bytes == 27136 == reserved["experts"].size_bytes
    with workspace.lease("kv_store", SIZES) as views:
        place = views["counts"].data_ptr()
    with workspace.lease("experts", {"E": 2, "T": 9000}) as views:
        assert views["fp8"].shape == (2, 9000) and views["fp8"].data_ptr() == place
        assert bool((views["fp8"] == 255).all()), "0xFF is NaN in FP8"
    assert workspace.high_water_bytes == 18176
    with pytest.raises(WorkspaceError, match="experts needs 36096 bytes of scratch, 27136 are reserved for it"):
        workspace.lease("experts", {"E": 4, "T": 9000}).__enter__()
    with pytest.raises(WorkspaceError, match="kv_store is an operator"):
        Workspace("cpu", [SMALL], SIZES, reserved={"kv_store": reserved["experts"]})


def test_a_plan_on_no_device_has_the_capacity_of_the_real_one() -> None:
    assert Workspace("meta", [SMALL, LARGE], SIZES).capacity_bytes == 1792 + 7424
