"""The facts about CPU arithmetic that row invariance stands on; a new torch or MKL that breaks one fails here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from day0_kernels import row_invariant
from day0_kernels.comparison import same_bits

SHAPES = [(64, 64), (64, 24), (48, 512), (128, 8), (7, 5), (1, 3), (600, 24), (2100, 40)]


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("depth", "width"), SHAPES)
def test_linear_rows_at_every_count_and_place(depth: int, width: int, threads: int) -> None:
    torch.set_num_threads(threads)
    x, weight, bias = _normal(70, depth), _normal(width, depth), _normal(width)
    whole = row_invariant.linear(x, weight, bias)
    for count in (1, 2, 7, 8, 15, 16, 17, 33, 64):
        assert same_bits(row_invariant.linear(x[:count], weight, bias), whole[:count]), count
        assert same_bits(row_invariant.linear(x[70 - count :], weight, bias), whole[70 - count :]), count
    wanted = (x.double() @ weight.double().T + bias).float()
    torch.testing.assert_close(whole, wanted, atol=1e-5 * depth**0.5, rtol=1e-5)


def test_linear_keeps_leading_dimensions_and_takes_no_row() -> None:
    weight = _normal(5, 64)
    assert row_invariant.linear(_normal(2, 3, 64), weight).shape == (2, 3, 5)
    assert row_invariant.linear(torch.zeros(0, 64), weight).shape == (0, 5)
    assert same_bits(
        row_invariant.linear(_normal(2, 3, 64), weight).view(6, 5),
        row_invariant.linear(_normal(2, 3, 64).view(6, 64), weight),
    )


def test_linear_of_no_feature() -> None:
    """A definition with `n_shared_experts` 0 has products from and to nothing."""
    x = _normal(3, 64)
    nothing = row_invariant.linear(x, torch.zeros(0, 64))
    assert nothing.shape == (3, 0)
    assert same_bits(row_invariant.linear(nothing, torch.zeros(5, 0)), torch.zeros(3, 5))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("rows", "depth", "width"), [(1, 16, 16), (4, 32, 64), (32, 16, 64), (64, 128, 24), (16, 900, 64)]
)
def test_bmm_entries_at_every_count(rows: int, depth: int, width: int, threads: int) -> None:
    torch.set_num_threads(threads)
    a, b = _normal(20, rows, depth), _normal(20, width, depth).transpose(1, 2)
    whole = row_invariant.bmm(a, b)
    shared = row_invariant.bmm(a, b[:1].expand(20, -1, -1))
    for count in (1, 2, 3, 8, 17):
        assert same_bits(row_invariant.bmm(a[:count], b[:count]), whole[:count])
        assert same_bits(row_invariant.bmm(a[20 - count :], b[20 - count :]), whole[20 - count :])
        assert same_bits(row_invariant.bmm(a[:count], b[:1].expand(count, -1, -1)), shared[:count])
    assert same_bits(whole[:1], shared[:1])


@pytest.mark.parametrize(
    "fn",
    [row_invariant.sigmoid, row_invariant.silu, torch.exp, torch.rsqrt, torch.sqrt],
    ids=["sigmoid", "silu", "exp", "rsqrt", "sqrt"],
)
def test_elements_at_every_place(fn: Callable[[Tensor], Tensor]) -> None:
    x = _normal(2100) * 4
    x = x.abs() + 0.1 if fn in (torch.rsqrt, torch.sqrt) else x
    whole = fn(x)
    for start in (0, 1, 7, 15, 16, 31):
        for count in (1, 2, 3, 7, 8, 15, 16, 17, 31, 33, 63, 65, 1000):
            assert same_bits(fn(x[start : start + count]), whole[start : start + count]), (start, count)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 16, 67, 64, 100, 7168])
def test_sums_and_softmax_of_rows(width: int) -> None:
    x = _normal(40, width)
    for fn in (lambda rows: rows.sum(-1), lambda rows: rows.mean(-1), row_invariant.softmax):
        whole = fn(x)
        for count in (1, 2, 3, 8, 17):
            assert same_bits(fn(x[:count]), whole[:count])
            assert same_bits(fn(x[40 - count :]), whole[40 - count :])


def test_functions_at_their_ends() -> None:
    x = torch.tensor([-torch.inf, -200.0, -1.0, 0.0, 1.0, 200.0, torch.inf, torch.nan])
    assert row_invariant.sigmoid(x)[[0, 1, 3, 5, 6]].tolist() == [0.0, 0.0, 0.5, 1.0, 1.0]
    assert row_invariant.silu(x)[[1, 3, 5, 6]].tolist() == [0.0, 0.0, 200.0, torch.inf]
    assert row_invariant.sigmoid(x)[7].isnan()
    torch.testing.assert_close(row_invariant.silu(x[2:6]), torch.nn.functional.silu(x[2:6]))
    rows = torch.tensor([[-torch.inf, -torch.inf], [0.0, -torch.inf], [1000.0, 1000.0]])
    assert row_invariant.softmax(rows).tolist() == [[0.0, 0.0], [1.0, 0.0], [0.5, 0.5]]
