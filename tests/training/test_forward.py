"""The training forward and its gradients equal upstream's, in float32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.models.glm5_next.modeling_glm5_next import recurrent_kimi_delta_attention

from tests.training.models import mini_model, router_bias, rows, upstream_logits, weights_of
from training.demo.delta import UnitLowerInverse, chunked_delta_attention
from training.demo.evaluate import pixel_values
from training.demo.experts import Plan, experts_layer
from training.demo.forward import TrainingForward
from training.demo.model import build_image_processor

pytestmark = pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")


@pytest.mark.parametrize("length", [7, 64, 101])
@pytest.mark.parametrize("own_topk", [True, False])
def test_logits_equal_upstreams(length: int, own_topk: bool) -> None:
    # 32 positions are chosen of up to 101; a dense layer is one that may choose all.
    model = mini_model(index_topk=32 if own_topk else 1024)
    inputs = rows(model, length, pictures=1 if length > 20 else 0)
    forward = TrainingForward(model.config)
    with torch.no_grad():
        got = forward(weights_of(model), router_bias(model), inputs, own_topk=own_topk).logits
        want = upstream_logits(model, inputs)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_own_choice_is_not_dense() -> None:
    model = mini_model()
    inputs = rows(model, 101)
    forward = TrainingForward(model.config)
    with torch.no_grad():
        both = [
            forward(weights_of(model), router_bias(model), inputs, own_topk=own_topk).logits
            for own_topk in (True, False)
        ]
    torch.testing.assert_close(both[0][:, :32], both[1][:, :32], rtol=1e-4, atol=1e-4)
    assert (both[0] - both[1])[:, 40:].abs().max() > 0.1


def test_gradients_equal_upstreams() -> None:
    model = mini_model(index_topk=1024)
    inputs = rows(model, 70, pictures=2)
    weights = weights_of(model)
    target = torch.randint(0, 600, (140,))
    got_logits = TrainingForward(model.config)(weights, router_bias(model), inputs, own_topk=False).logits
    names = [name for name in weights if "indexer" not in name]
    losses = [F.cross_entropy(logits.flatten(0, 1), target) for logits in (got_logits, upstream_logits(model, inputs))]
    got, want = (torch.autograd.grad(loss, [weights[name] for name in names]) for loss in losses)
    for name, mine, theirs in zip(names, got, want, strict=True):
        scale = theirs.abs().max().item() + 1e-6
        assert (mine - theirs).abs().max().item() < 2e-3 * scale, name


def test_the_indexers_loss_moves_the_indexer_alone_and_can_be_lowered() -> None:
    model = mini_model()
    inputs = rows(model, 101)
    weights = weights_of(model)
    forward = TrainingForward(model.config)
    torch.manual_seed(0)
    first = forward(weights, router_bias(model), inputs, own_topk=True, with_kl=True).kl
    grads = torch.autograd.grad(first, list(weights.values()), allow_unused=True)
    moved = {name for name, grad in zip(weights, grads, strict=True) if grad is not None and grad.abs().max() > 0}
    assert moved and all(".indexer." in name for name in moved)
    with torch.no_grad():
        for name, grad in zip(weights, grads, strict=True):
            if name in moved:
                weights[name].sub_(0.3 * grad)
    torch.manual_seed(0)
    assert forward(weights, router_bias(model), inputs, own_topk=True, with_kl=True).kl < first


@pytest.mark.parametrize("gate", [0.0, -0.05, -5.0])
def test_delta_attention_with_repeated_keys_and_hard_gates(gate: float) -> None:
    """The worst cases for a closed form: keys all equal, and gates at their bound for a whole chunk."""
    generator = torch.Generator().manual_seed(0)
    q, v = (torch.randn(1, 75, 2, 16, generator=generator) for _ in range(2))
    k = torch.randn(1, 1, 2, 16, generator=generator).expand(1, 75, 2, 16)
    log_gate = torch.full((1, 75, 2, 16), gate)
    beta = torch.full((1, 75, 2), 0.98)
    got = chunked_delta_attention(q, k, v, log_gate, beta)
    want, _ = recurrent_kimi_delta_attention(q, k, v, log_gate, beta, None, False, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_the_inverse_has_the_right_gradient() -> None:
    lower = torch.randn(2, 8, 8, dtype=torch.float64).tril(-1).requires_grad_()
    assert torch.autograd.gradcheck(lambda n: UnitLowerInverse.apply(n.tril(-1)), (lower,))


def test_all_tokens_with_one_expert() -> None:
    """The most uneven load: nothing is dropped and no padding shows."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 8, generator=generator)
    weights = {
        "gate_up_proj": torch.randn(4, 12, 8, generator=generator),
        "down_proj": torch.randn(4, 8, 6, generator=generator),
    }
    ids = torch.tensor([[2, 3]]).expand(50, 2).contiguous()
    share = torch.rand(50, 2, generator=generator)
    got = experts_layer(weights, x, Plan(ids, 4), share, 10.0)
    want = torch.zeros(50, 8)
    for place, expert in enumerate((2, 3)):
        gate, up = (x @ weights["gate_up_proj"][expert].T).chunk(2, -1)
        act = F.silu(gate.clamp(max=10.0)) * up.clamp(-10.0, 10.0)
        want += share[:, place, None] * (act @ weights["down_proj"][expert].T)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_evaluations_pixels_are_the_processors() -> None:
    images = torch.randint(0, 256, (3, 112, 112, 3), dtype=torch.uint8)
    want = build_image_processor()(images=[image.numpy() for image in images], return_tensors="pt")
    got, grid = pixel_values(images.numpy(), torch.device("cpu"))
    torch.testing.assert_close(got, want["pixel_values"], rtol=0, atol=2e-6)
    assert grid.tolist() == want["image_grid_thw"].tolist()
