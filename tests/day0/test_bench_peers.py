"""Adapters of peers as far as they show without a GPU: which shapes they know, what they are held against."""

from __future__ import annotations

import importlib
from dataclasses import astuple

import pytest
import torch

from day0.bench.ops.families import PEERS, modules_with
from day0.bench.ops.peers import flash_mla, flashinfer, index_scores, peer, raw_delta, residuals, routing
from day0_kernels.attention_residual import reference as residual_reference
from day0_kernels.hyper_connection import reference as hyper_reference
from day0_kernels.sparse_mla import reference as mla_reference

K = 1024


@pytest.mark.parametrize(
    ("read", "name", "wanted"),
    [
        (index_scores.Size.of, "32 heads, 128k, batch 32", (32, 128 * K, 32, 2048)),
        (index_scores.Size.of, "32 heads, 4k x 64k", (32, 64 * K, 0, 2048)),
        (index_scores.Size.of, "32 heads, 4k x 128k, pools of 16", (32, 8 * K, 0, 128)),
        (index_scores.Size.of, "4,096 tokens", None),
        (routing.Product.of, "GLM up, 32 tokens", (4096, 4096, 32)),
        (routing.Product.of, "GLM down, 4,096 tokens", (4096, 2048, 4096)),
        (routing.Product.of, "4,096 tokens x 8 of 4096", None),
        (raw_delta.Size.of, "KDA 64 heads, 8 x 1k", (True, 8, 1024)),
        (raw_delta.Size.of, "KDA bf16 gates 64 heads, 4k", (True, 1, 4096)),
        (raw_delta.Size.of, "GDN 64 heads, batch 128", (False, 128, 1)),
        (raw_delta.Size.of, "KDA 64 heads, 7 uneven of 4k", None),
        (flash_mla.size_of, "GLM 64k, batch 1", ("GLM", 64 * K, 1)),
        (flash_mla.size_of, "DSV3.2 4k x 64k", ("DSV3.2", 64 * K, 0)),
        (flash_mla.size_of, "64 heads, 4k", None),
    ],
)
def test_a_name_says_the_size(read: object, name: str, wanted: tuple[object, ...] | None) -> None:
    assert callable(read)
    found = read(name)
    assert (found and astuple(found)) == wanted


@pytest.mark.parametrize(
    ("operator", "name", "wanted"),
    [
        ("attention_residual", "4,096 tokens, 9 sources of 7168", (4096, 7168, 9)),
        ("attention_residual", "1 tokens, 9 sources of 4096", (1, 4096, 9)),
        ("hc_pre_norm", "128 tokens", (128, 4096, 4)),
        ("kv_store", "128 tokens", None),
    ],
)
def test_residual_names_say_the_size(operator: str, name: str, wanted: tuple[int, int, int] | None) -> None:
    size = residuals.Size
    found = size.of_sources(operator, name) or size.of_streams(operator, name)
    assert (found and astuple(found)) == wanted


def test_an_adapter_has_nothing_where_its_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer, "find_spec", lambda module: None)
    asked = {
        "fp8_index_select_decode": "32 heads, 128k, batch 32",
        "sparse_mla_decode": "GLM 64k, batch 1",
        "gated_delta_prefill": "KDA 64 heads, 4k",
        "mxfp4_expert_gemm": "GLM up, 128 tokens",
        "fp8_expert_product": "GLM up, 128 tokens",
        "attention_residual": "128 tokens, 9 sources of 4096",
        "hc_post": "128 tokens",
    }
    adapters = modules_with("peers", PEERS)
    missing = {name for name in adapters for one in asked.items() if list(importlib.import_module(name).peers(*one))}
    assert missing <= {f"{PEERS}.torch_compiled"}
    monkeypatch.setattr(peer, "find_spec", lambda module: module)
    there = {name for name in adapters for one in asked.items() if list(importlib.import_module(name).peers(*one))}
    assert there == set(adapters)


def test_a_peer_is_named_by_package_version_and_function() -> None:
    assert peer.Peer("torch", "compile", lambda: None).who == f"torch {torch.__version__} compile"  # type: ignore[arg-type, return-value]
    assert peer.version_of("no_such_package") == "of unknown version"


def test_sparse_attention_is_held_against_the_same_definition_as_ours() -> None:
    torch.manual_seed(0)
    q, latents = torch.randn(2, 3, 576), torch.randn(64, 576)
    ids = torch.stack([torch.randperm(64)[:9] for _ in range(2)]).int()
    table = torch.arange(4, dtype=torch.int32).expand(2, 4)
    scalars = {"block_size": 16, "softmax_scale": 0.1, "value_dim": 512}
    wanted = mla_reference.sparse_mla_decode(q, latents, ids, table, **scalars)
    torch.testing.assert_close(flash_mla.attention(q, latents, ids, 0.1), wanted)


def test_residuals_are_held_against_the_same_definitions_as_ours() -> None:
    torch.manual_seed(0)
    sources, query = torch.randn(5, 3, 32), torch.randn(32)
    attending = {"logit_scale": 1.0, "norm_eps": residuals.EPS, "normed_values": False}
    wanted = residual_reference.attention_residual(sources.transpose(0, 1), query[None], **attending)
    torch.testing.assert_close(residuals.attend(sources, query), wanted.reshape(3, 32))
    streams, weight, base = torch.randn(3, 4, 32), torch.randn(24, 128), torch.randn(24)
    post, comb, collapsed = hyper_reference.hc_pre(
        streams, weight, base, torch.ones(3), norm_eps=residuals.EPS, hc_eps=residuals.EPS, sinkhorn_iters=20
    )
    found = residuals.collapse(streams, weight.T.contiguous(), base)
    torch.testing.assert_close(found[0], collapsed)
    torch.testing.assert_close(found[1], post)
    torch.testing.assert_close(found[2], comb)
    added = torch.randn(3, 32)
    # Upstream's matrix is read the other way round.
    wanted = hyper_reference.hc_post(streams, added, post, comb.mT.contiguous())
    torch.testing.assert_close(residuals.spread(streams, added, post, comb), wanted)


def test_chosen_ids_are_compared_as_sets() -> None:
    scores = torch.tensor([[3.0, 1.0, 2.0, -torch.inf], [0.0, 1.0, 2.0, 3.0]])
    assert flashinfer.other_ids(torch.tensor([[2, 0], [3, 2]]), scores, 2) == 0.0
    assert flashinfer.other_ids(torch.tensor([[2, 1], [3, 2]]), scores, 2) == 0.5
    assert flashinfer.other_ids(torch.tensor([[2, 2], [3, 2]]), scores, 2) == float("inf")
    assert flashinfer.other_ids(torch.tensor([[0, 2, 1, -1]]), scores[:1], 4) == 0.0
