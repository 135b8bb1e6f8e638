"""Ordinary products of a definition: the same values as torch's, and the same bits whatever else is in the batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from llm_svc.adopt.rows import bind_linears, join_weights, per_head

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


def test_joined_weights_are_held_once() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(64, outputs, bias=False) for outputs in (48, 1, 200)]
    names = [name for layer in layers for name, _ in layer.named_parameters()]
    values = [layer.weight.detach().clone() for layer in layers]
    joined = join_weights(*(layer.weight for layer in layers))
    assert [name for layer in layers for name, _ in layer.named_parameters()] == names
    assert all(torch.equal(layer.weight, value) for layer, value in zip(layers, values, strict=True))
    assert {layer.weight.untyped_storage().data_ptr() for layer in layers} == {joined.untyped_storage().data_ptr()}
    assert torch.equal(joined, torch.cat(values))


def test_modules_join_their_products_when_they_are_bound() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(8, 3, bias=False), nn.Linear(8, 5, bias=False)

        def join_products(self) -> None:
            self.joined = join_weights(self.left.weight, self.right.weight)

    outer = nn.Sequential(Pair())
    bind_linears(outer)
    assert outer[0].joined.shape == (8, 8) and set(outer.state_dict()) == {"0.left.weight", "0.right.weight"}
