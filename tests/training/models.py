"""Mini models of the demo's kind and random rows for them; it knows no data and no files."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from day0.tiny import build_tokenizer
from training.demo.forward import Inputs
from training.demo.model import build_config, build_model
from training.demo.train import mini_sizes

WORDS = 600


def mini_model(**sizes: Any) -> Any:
    """Upstream's model of a mini configuration, float32, with no part at rest: gates and biases are random."""
    config = build_config(build_tokenizer(640), replace(mini_sizes(), **sizes))
    model = build_model(config, 0).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "compress" in name or name.endswith(("hc.base", "correction_bias", "k_norm.bias")):
                # Connections far from even ones, or Sinkhorn would be done after one round.
                std = 1.0 if name.endswith("hc.base") else 0.2
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * std)
    return model


def weights_of(model: Any) -> dict[str, Tensor]:
    """Parameters by name, those with values."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.numel()}


def router_bias(model: Any) -> Tensor:
    """float32 `[layers, E]`."""
    return torch.stack([layer.mlp.gate.e_score_correction_bias for layer in model.model.language_model.layers])


def rows(model: Any, length: int, *, pictures: int = 0, seed: int = 0) -> Inputs:
    """Two rows of random ids; `pictures` of them begin with a picture each, and one place for a picture is unused."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (2, length), generator=generator, dtype=torch.int32)
    images = torch.randint(0, 256, (pictures + 1, 112, 112, 3), generator=generator, dtype=torch.uint8)
    slots = torch.full((pictures + 1, 16), -1, dtype=torch.int32)
    for row in range(pictures):
        ids[row, 2:18] = model.config.image_token_id
        slots[row] = row * length + 2 + torch.arange(16)
    task = torch.where(torch.rand(ids.shape, generator=generator) < 0.2, 1, -1).to(torch.int8)
    return Inputs(ids, task, images, slots)


def upstream_logits(model: Any, inputs: Inputs) -> Tensor:
    """Upstream's logits of the same rows, its pictures through upstream's own processor."""
    from training.demo.model import build_image_processor

    shown = [image.numpy() for image, slots in zip(inputs.images, inputs.image_slots, strict=True) if slots[0] >= 0]
    pictures = build_image_processor()(images=shown, return_tensors="pt") if shown else {}
    return model(input_ids=inputs.ids.to(torch.int64), use_cache=False, **pictures).logits
