"""Aligns the vision service's tower with upstream's, part by part; knows no language model."""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoImageProcessor
from transformers.models.glm5_next import modeling_glm5_next as definition

from day0.align.tap import Comparison, Verdict, compare_values, tolerance
from llm_svc.service import open_source
from llm_svc.settings import LlmSettings
from vision_svc.encoder import EncodeError, Encoder
from vision_svc.processor import PatchProcessor

_PARTS = ("patch_embed", "qkv", "attn", "mlp", "merger")
_ROPE = "apply_rotary_pos_emb_vision"


def align_vision(
    folder: Path, upstream: Any, image: Image.Image, dtype: str
) -> tuple[list[Comparison], Tensor, Tensor]:
    """Comparisons in the order of the computation, our visual tokens and upstream's, float [tokens, hidden]."""
    processor = AutoImageProcessor.from_pretrained(folder, local_files_only=True, backend="pil")
    inputs = processor(images=[image], return_tensors="pt")
    theirs: dict[str, Tensor] = {}
    with ExitStack() as stack:
        _watch(stack, upstream.model.visual, partial(_keep, theirs))
        (expected,) = upstream.model.get_image_features(
            inputs["pixel_values"].to(getattr(torch, dtype)), inputs["image_grid_thw"], return_dict=True
        ).pooler_output
    with closing(open_source(LlmSettings(model=str(folder)))) as source:
        encoder = Encoder(source, dtype=dtype, batch_invariant=True)
    comparisons: list[Comparison] = []
    width = int(upstream.config.vision_config.intermediate_size)

    def judge(key: str, operator: str, value: Tensor) -> Tensor:
        allowed = tolerance(width, getattr(torch, dtype))
        verdict, error, note = compare_values(value, theirs[key], allowed)
        comparisons.append(Comparison(None, key, operator, verdict, error, allowed, note))
        return theirs[key].reshape(value.shape).to(value.dtype)

    patches = PatchProcessor(folder)(image)
    judge_pixels = compare_values(patches.pixels, inputs["pixel_values"], 0.0)
    comparisons.append(Comparison(None, "patches", "vision processor", judge_pixels[0], judge_pixels[1], 0.0))
    with ExitStack() as stack:
        _watch(stack, encoder._tower, judge)
        (encoded,) = encoder.encode([patches])
    seen = {found.tap for found in comparisons}
    comparisons += [
        Comparison(None, key, key, Verdict.UNSEEN, 0.0, 0.0, "our tower has no such part")
        for key in theirs
        if key not in seen
    ]
    if isinstance(encoded, EncodeError):
        raise encoded
    kind = np.float32 if dtype == "float32" else np.int16
    rows = torch.from_numpy(np.frombuffer(encoded.data, dtype=kind).copy()).view(getattr(torch, dtype))
    return comparisons, rows.view(encoded.tokens, encoded.hidden).float(), expected


def _keep(found: dict[str, Tensor], key: str, operator: str, value: Tensor) -> Tensor:
    found[key] = value
    return value


def _watch(stack: ExitStack, tower: nn.Module, see: Any) -> None:
    """Calls `see` with each part's result, in order, and lets the tower go on with what it returns."""
    calls = 0
    rope = getattr(definition, _ROPE)

    def rotated(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        q, k = rope(*args, **kwargs)
        calls += 1
        name = f"vision block {calls - 1}, rotated"
        return see(f"{name} query", "vision rope", q), see(f"{name} key", "vision rope", k)

    def after(key: str, operator: str, module: nn.Module, args: Any, out: Any) -> Any:
        if isinstance(out, tuple):
            return (see(key, operator, out[0]), *out[1:])
        return see(key, operator, out)

    setattr(definition, _ROPE, rotated)
    stack.callback(setattr, definition, _ROPE, rope)
    for name, module in tower.named_modules():
        leaf = name.rpartition(".")[2]
        if (
            name == "merger"
            or leaf in ("patch_embed", "qkv", "attn", "mlp")
            or (name.startswith("blocks.") and leaf.isdigit())
        ):
            stack.callback(module.register_forward_hook(partial(after, name, f"vision {name}")).remove)
