"""What every Triton backend asks before it launches: may it, and with which committed configuration.

It knows no operator and imports no Triton; `triton.py` beside an operator's spec is the backend, `_triton_*.py` its
device code, which is imported when the first call launches it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from day0_kernels.described_device import described_capability

PRIORITY = 10
SMALLEST_CAPABILITY = (8, 9)
# What tensors that are on no GPU stand for: the interpreter and offline compilation look at what is shipped.
STAND_IN = "sm_90"


def device_refusal(device: torch.device) -> str | None:
    """Why no Triton kernel of ours runs on a device, or None; of a described device only its capability is known."""
    capability = described_capability()
    if capability is None:
        if find_spec("triton") is None:
            return "triton is not installed"
        if not torch.cuda.is_available():
            return "this process sees no CUDA device"
        capability = torch.cuda.get_device_capability(device)
    if capability < SMALLEST_CAPABILITY:
        return f"compute capability {capability[0]}.{capability[1]} is below 8.9, which e4m3 needs"
    return None


@cache
def architecture(device: torch.device) -> str:
    """Name of the configuration file for a device, such as sm_90."""
    if device.type != "cuda":
        return STAND_IN
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


@cache
def _committed(folder: Path, name: str) -> Mapping[str, Any]:
    path = folder / f"{name}.json"
    found: Mapping[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


@cache
def _chosen(folder: Path, name: str, kernel: str, size: int) -> Mapping[str, int] | None:
    for entry in _committed(folder, name).get(kernel, ()):
        if entry["up_to"] is None or size <= entry["up_to"]:
            return {key: value for key, value in entry.items() if key != "up_to"}
    return None


def configuration(
    module_file: str, device: torch.device, kernel: str, size: int, plain: Mapping[str, int]
) -> Mapping[str, int]:
    """Block sizes, `num_warps` and `num_stages` of a kernel at a size: committed ones, or `plain`.

    Committed means `<architecture>.json` beside `module_file`: for each kernel a list of configurations, each for sizes
    up to its `up_to` (null: any), ascending. `plain` serves every architecture without such a file.
    """
    return _chosen(Path(module_file).parent, architecture(device), kernel, size) or plain


@cache
def multiprocessors(device: torch.device) -> int:
    """Of a device, for kernels that run one program or a few on each; an H200's where there is no device to ask."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
