"""The references against the modules of transformers they replace, on random tensors of the tiny model's shapes."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.glm5_next import modeling_glm5_next as upstream
from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig

from day0_kernels.delta_gates.reference import delta_gates, gated_norm
from day0_kernels.expert_gemm.reference import expert_gemm
from day0_kernels.gated_delta.reference import gated_delta_decode, gated_delta_prefill
from day0_kernels.hyper_connection.reference import hc_post, hc_pre
from day0_kernels.index_pool.reference import index_pool
from day0_kernels.index_select.reference import index_select_decode, index_select_prefill
from day0_kernels.row_invariant import linear
from day0_kernels.short_conv.reference import short_conv_decode, short_conv_prefill
from day0_kernels.sparse_mla.reference import sparse_mla_prefill

BLOCK, POOL, TOPK = 16, 4, 64
CHUNK = 64


@pytest.fixture(autouse=True)
def upstream_is_plain_torch() -> None:
    """With these installed upstream would run their kernels, and the comparison would be with them."""
    assert find_spec("fla") is None
    assert find_spec("causal_conv1d") is None
    torch.manual_seed(0)


def _config(**changes: Any) -> Glm5NextTextConfig:
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "kv_lora_rank": 32,
        "q_lora_rank": 48,
        "v_head_dim": 16,
        "qk_nope_head_dim": 16,
        "index_topk": TOPK,
        "index_head_dim": 16,
        "index_n_heads": 32,
        "index_kpool": POOL,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "hc_mult": 2,
        "layer_types": ["linear_attention"] * 3 + ["indexed_attention"],
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
        "vocab_size": 64,
        "pad_token_id": 0,
    }
    return Glm5NextTextConfig(**(sizes | changes))


def _randomised(module: nn.Module, std: float = 0.3) -> Any:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, std)
    return module.eval()


def _ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _selected(indexer: Any, hidden: Tensor, residual: Tensor, scalars: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Our indices for every token, by prefill of the whole and by decode after each token."""
    length, width = len(hidden), indexer.head_dim
    table = torch.arange(-(-length // BLOCK), dtype=torch.int32).flip(0)[None]
    q = linear(residual, indexer.wq_b.weight).view(length, -1, width)
    keys = indexer.k_norm(linear(hidden, indexer.wk.weight))
    gates = linear(hidden, indexer.index_kpool_compress_gate)
    weights = linear(hidden, indexer.weights_proj.weight) * indexer.n_heads**-0.5
    pools = torch.full((table.shape[1] * BLOCK // POOL, width), torch.nan)
    tail = torch.full((1, POOL, 2, width), torch.nan)
    decoded = []
    for t in range(length):
        row = slice(t, t + 1)
        index_pool(
            keys[row],
            gates[row],
            indexer.index_kpool_compress_ape,
            tail,
            pools,
            _ints(0),
            table,
            _ints(0, 1),
            _ints(t),
            BLOCK,
        )
        decoded.append(index_select_decode(q[row], weights[row], pools, table, _ints(t + 1), **scalars))
    whole = torch.full_like(pools, torch.nan)
    index_pool(
        keys, gates, indexer.index_kpool_compress_ape, tail, whole, _ints(0), table, _ints(0, length), _ints(0), BLOCK
    )
    prefill = index_select_prefill(q, weights, whole, table, _ints(0, length), _ints(0), **scalars)
    return prefill, torch.cat(decoded)


@pytest.mark.parametrize("always_tail", [True, False])
@pytest.mark.parametrize("length", [1, 3, 4, 5, TOPK - 1, TOPK, TOPK + 1, 150])
def test_indexer(length: int, always_tail: bool) -> None:
    config = _config(index_kpool_always_select_tail=always_tail)
    indexer = _randomised(upstream.Glm5NextTextIndexer(config, 3))
    hidden, residual = torch.randn(length, 64), torch.randn(length, 48)
    mask = torch.ones(1, length, dtype=torch.bool)
    theirs = indexer(hidden[None], residual[None], mask, None)[0]
    scalars = {
        "pool_size": POOL,
        "topk_tokens": TOPK,
        "block_size": BLOCK,
        "softmax_scale": indexer.softmax_scale,
        "always_tail": always_tail,
    }
    for ours in _selected(indexer, hidden, residual, scalars):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.sort(1).values, theirs.sort(1).values)


@pytest.mark.parametrize("length", [1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 5])
def test_gated_delta(length: int) -> None:
    heads, width = 4, 16
    q, k, v = torch.randn(3, length, heads, width).unbind(0)
    g = -5 * torch.sigmoid(2 * torch.randn(length, heads, width))
    beta = torch.sigmoid(torch.randn(length, heads))
    begun = torch.randn(1, heads, width, width)
    options: dict[str, Any] = {"initial_state": begun, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    batched = [x[None] for x in (q, k, v)]
    for theirs in (upstream.chunk_kimi_delta_attention, upstream.recurrent_kimi_delta_attention):
        wanted, wanted_state = theirs(*batched, g=g[None], beta=beta[None], **options)
        state = begun.clone()
        out = gated_delta_prefill(q, k, v, g, beta, state, _ints(0), _ints(0, length), scale=width**-0.5)
        torch.testing.assert_close(out, wanted[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(state, wanted_state, atol=1e-5, rtol=1e-5)
        state = begun.clone()
        rows = [
            gated_delta_decode(*(x[t : t + 1] for x in (q, k, v, g, beta)), state, _ints(0), scale=width**-0.5)
            for t in range(length)
        ]
        torch.testing.assert_close(torch.cat(rows), wanted[0], atol=1e-5, rtol=1e-5)


def test_short_convolution() -> None:
    x, weight = torch.randn(11, 24), torch.randn(24, 4)
    wanted = upstream.causal_conv1d_fn(x.T[None], weight, activation="silu")[0].T
    state = torch.zeros(1, 24, 3)
    torch.testing.assert_close(short_conv_prefill(x, weight, state, _ints(0), _ints(0, 11)), wanted)
    their_state = x.T[None, :, -3:].clone()
    new = torch.randn(1, 24)
    wanted = upstream.causal_conv1d_update(new[..., None], their_state, weight, activation="silu")[..., 0]
    torch.testing.assert_close(short_conv_decode(new, weight, state, _ints(0)), wanted)
    assert torch.equal(state, their_state)


@pytest.mark.parametrize("streams", [2, 4])
@pytest.mark.parametrize("tokens", [1, 17])
def test_hyper_connection(streams: int, tokens: int) -> None:
    config = _config(hc_mult=streams)
    module = _randomised(upstream.Glm5NextTextHyperConnection(config))
    hidden = torch.randn(1, tokens, streams, 64)
    wanted = module(hidden)
    post, comb, collapsed = hc_pre(
        hidden[0],
        module.fn,
        module.base,
        module.scale,
        norm_eps=config.rms_norm_eps,
        hc_eps=config.hc_eps,
        sinkhorn_iters=config.hc_sinkhorn_iters,
    )
    for ours, theirs in zip((post, comb, collapsed), wanted, strict=True):
        torch.testing.assert_close(ours, theirs[0], atol=3e-6, rtol=1e-5)
    out = torch.randn(tokens, 64)
    # The lines of Glm5NextTextDecoderLayer.forward behind a sub-layer.
    mixed = post.unsqueeze(-1) * out.unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), hidden[0])
    torch.testing.assert_close(hc_post(hidden[0], out, post, comb), mixed)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_gates_around_the_delta_rule(lower_bound: float | None) -> None:
    config = _config(linear_lower_bound=lower_bound)
    module = _randomised(upstream.Glm5NextTextLinearAttention(config, 0), 3.0)
    hidden = torch.randn(1, 40, 64)
    forgets = module.forget_gate
    forget = forgets.f_b_proj(forgets.f_a_proj(hidden))[0].view(40, 4, 16)
    # Softplus ends in a straight line, and values are on both sides of where that begins.
    assert forget.max() > 20
    g, beta = delta_gates(forget, module.b_proj(hidden)[0], forgets.dt_bias, forgets.A_log, lower_bound=lower_bound)
    torch.testing.assert_close(g, forgets(hidden)[0], atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(beta, torch.sigmoid(module.b_proj(hidden)[0]))
    out, gate = torch.randn(2, 40, 4, 16)
    normed = gated_norm(out, gate, module.o_norm.weight, norm_eps=config.rms_norm_eps)
    torch.testing.assert_close(normed, module.o_norm(out, gate))


@pytest.mark.parametrize("choice", ["spread", "all on one", "all on the last", "two idle", "none"])
def test_experts(choice: str) -> None:
    """Gate weights set by hand; upstream's loop over experts against two grouped products."""
    experts = _randomised(upstream.Glm5NextTextExperts(_config()))
    tokens = 0 if choice == "none" else 21
    hidden = torch.randn(tokens, 64)
    ids = {
        "spread": torch.randint(0, 8, (tokens, 2)),
        "all on one": torch.zeros(tokens, 2, dtype=torch.long),
        "all on the last": torch.full((tokens, 2), 7),
        "two idle": torch.randint(2, 8, (tokens, 2)),
        "none": torch.zeros(0, 2, dtype=torch.long),
    }[choice]
    weights = torch.rand(tokens, 2)
    wanted = experts.forward(hidden, ids, weights)
    order = ids.view(-1).argsort(stable=True)
    offsets = torch.cat([torch.zeros(1), torch.bincount(ids.view(-1), minlength=8).cumsum(0)]).int()
    inner = experts._apply_gate(expert_gemm(hidden[order // 2], experts.gate_up_proj, offsets))
    rows = expert_gemm(inner, experts.down_proj, offsets) * weights.view(-1)[order, None]
    ours = torch.zeros_like(hidden).index_add_(0, order // 2, rows)
    torch.testing.assert_close(ours, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("length", [5, TOPK + 1, 150])
def test_absorbed_attention(length: int) -> None:
    """Scores over latents with kv_b folded into query and output equal upstream's attention over expanded keys."""
    config = _config()
    config._attn_implementation = "eager"
    module = _randomised(upstream.Glm5NextTextAttention(config, 3), 0.15)
    hidden = torch.randn(length, 64)
    mask = torch.ones(1, length, dtype=torch.bool)
    wanted = module(hidden[None], mask)[0][0]
    residual = module.q_a_layernorm(module.q_a_proj(hidden))
    chosen = module.indexer(hidden[None], residual[None], mask, None)[0]
    up = module.kv_b_proj.weight.view(4, 32, 32)
    q = torch.einsum("thd,hdr->thr", module.q_b_proj(residual).view(length, 4, 16), up[:, :16])
    table = torch.arange(-(-length // BLOCK), dtype=torch.int32)[None]
    latents = torch.full((table.shape[1] * BLOCK, 32), torch.nan)
    latents[:length] = module.kv_a_layernorm(module.kv_a_proj_with_mqa(hidden))
    out = sparse_mla_prefill(
        q, latents, chosen, table, _ints(0, length), block_size=BLOCK, softmax_scale=module.scaling, value_dim=32
    )
    ours = module.o_proj(torch.einsum("thr,hdr->thd", out, up[:, 16:]).flatten(1))
    torch.testing.assert_close(ours, wanted, atol=2e-5, rtol=1e-5)
