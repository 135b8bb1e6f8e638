"""Ordinary products of a definition: the same values as torch's, and the same bits whatever else is in the batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from llm_svc.adopt.rows import bind_linears, per_head

ROWS = [1, 2, 15, 16, 17, 33, 100]


def pieces(count: int) -> list[slice]:
    """Each row alone at both ends, and the halves."""
    return [slice(0, 1), slice(count - 1, count), slice(0, (count + 1) // 2), slice(count // 2, count)]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("width", [(64, 192), (300, 40)])
def test_bound_linear(rows: int, width: tuple[int, int]) -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(*width), nn.Linear(width[1], 7, bias=False))
    x = torch.randn(1, rows, width[0])
    expected = layer(x)
    names = [name for name, _ in layer.named_parameters()]
    bind_linears(layer)
    with torch.inference_mode():
        whole = layer(x)
        torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-5)
        for piece in pieces(rows):
            assert torch.equal(layer(x[:, piece]), whole[:, piece])
    assert [name for name, _ in layer.named_parameters()] == names


@pytest.mark.parametrize("rows", ROWS)
def test_per_head(rows: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(rows, 4, 24), torch.randn(4, 24, 40)
    whole = per_head(x, weight)
    torch.testing.assert_close(whole, torch.einsum("thk,hkn->thn", x, weight), rtol=1e-5, atol=1e-5)
    for piece in pieces(rows):
        assert torch.equal(per_head(x[piece], weight), whole[piece])
