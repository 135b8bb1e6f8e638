"""Loads unmodified upstream from a checkpoint, packed experts decoded here; it shares no arithmetic with our tier."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor
from transformers.modeling_utils import load_state_dict

from day0.inventory.source import InventoryError
from llm_svc.adopt.families import Family

ACCELERATORS = ("fla", "causal_conv1d")
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=np.float32)
_PACKED, _SCALE = "weight_packed", "weight_scale"


class AlignError(InventoryError):
    """The model cannot be compared; the message says why."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What took part. `accelerators` are packages whose kernels upstream runs in place of its own formulas."""

    versions: dict[str, str]
    accelerators: tuple[str, ...]


def environment() -> Environment:
    """Of this process."""
    names = ("torch", "transformers", *ACCELERATORS)
    present = {name: importlib.util.find_spec(name) is not None for name in names}
    versions = {}
    for name in names:
        if present[name]:
            try:
                versions[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                versions[name] = "unknown"
    return Environment(versions, tuple(name for name in ACCELERATORS if present[name]))


def load_upstream(folder: Path, family: Family, dtype: torch.dtype) -> Any:
    """The family's own class by its own loader, experts one after the other as the definition writes them.

    Packed experts (compressed-tensors mxfp4-pack-quantized) are decoded first. AlignError for another quantisation.
    """
    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    quantization = getattr(config, "quantization_config", None)
    options: dict[str, Any] = {"dtype": dtype, "experts_implementation": "eager"}
    if quantization is None:
        model = family.model.from_pretrained(folder, local_files_only=True, **options)
    else:
        if quantization.get("quant_method") != "compressed-tensors":
            raise AlignError(
                f"quantization_config: {quantization.get('quant_method')!r}; align decodes compressed-tensors"
            )
        del config.quantization_config
        tensors = decode_packed(_read(folder))
        model, info = family.model.from_pretrained(
            None, config=config, state_dict=tensors, output_loading_info=True, **options
        )
        wrong = [f"{kind}: {sorted(map(str, names))[:3]}" for kind, names in info.items() if names]
        if wrong:
            raise AlignError(f"upstream does not load the decoded weights: {'; '.join(wrong)}")
    return model.eval().requires_grad_(False)


def decode_packed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each `...weight_packed` uint8 [N, K / 2] as `...weight` float32 [N, K]: OCP MX, low nibble first, 2^(s - 127)."""
    decoded = {name: t for name, t in tensors.items() if not name.endswith((_PACKED, _SCALE))}
    for name, codes in tensors.items():
        if not name.endswith(_PACKED):
            continue
        stem = name.removesuffix(_PACKED)
        scales = tensors[stem + _SCALE].view(torch.uint8).numpy().astype(np.int32)
        nibbles = codes.view(torch.uint8).numpy()
        values = np.empty((*nibbles.shape[:-1], 2 * nibbles.shape[-1]), dtype=np.float32)
        values[..., 0::2], values[..., 1::2] = _E2M1[nibbles & 15], _E2M1[nibbles >> 4]
        grouped = values.reshape(*scales.shape, -1)
        decoded[stem + "weight"] = torch.from_numpy(np.ldexp(grouped, scales[..., None] - 127).reshape(values.shape))
    return decoded


def _read(folder: Path) -> dict[str, Tensor]:
    """All tensors of the checkpoint, by upstream's own reader."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_state_dict(str(path))
    return found
