"""Writes a checkpoint whose routed experts are MXFP4, shard by shard; it knows tensor names, not models.

The result is what compressed-tensors calls `mxfp4-pack-quantized`: `weight_packed` and `weight_scale` for each expert's
gate, up and down projection, everything else as it was. Memory is one expert's matrix and what encoding it takes.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from day0.expert_shards import Errors, Shard, layout_of, open_shard, write_shard
from day0_kernels.mxfp4 import GROUP_SIZE
from svc_common.checkpoint import INDEX_NAME
from svc_common.checkpoint_errors import IndexFault, ShardsMissing
from svc_common.errors import InvalidArgument
from svc_common.safetensors_header import TensorSpan
from svc_common.weight_index import SINGLE_NAME, parse_index, require_tensors

CONFIG_NAME = "config.json"
FORMAT = "mxfp4-pack-quantized"
# Of the modules, not the tensors; group 0 is all there is.
TARGETS = r"re:.*\.experts\.\d+\.(gate|up|down)_proj$"


@dataclass(slots=True)
class LayerReport:
    """One layer's experts: how many, and what encoding them did."""

    experts: int
    errors: Errors = field(default_factory=Errors)

    @property
    def relative_error(self) -> float:
        """Root of the squared error over the squared weights; 0 for weights that are all zero."""
        squared = self.errors.squared_weight
        return math.sqrt(self.errors.squared_error / squared) if squared else 0.0


@dataclass(frozen=True, slots=True)
class QuantizeReport:
    """What was written; layers by the prefix of their experts, bytes of all tensors."""

    layers: dict[str, LayerReport]
    bytes_before: int
    bytes_after: int

    def as_dict(self) -> dict[str, Any]:
        """The report as JSON has it."""
        layers = {
            prefix: {
                "experts": layer.experts,
                "relative_error": layer.relative_error,
                "bytes_before": layer.errors.bytes_before,
                "bytes_after": layer.errors.bytes_after,
            }
            for prefix, layer in sorted(self.layers.items())
        }
        return {"format": FORMAT, "bytes_before": self.bytes_before, "bytes_after": self.bytes_after, "layers": layers}


def quantize_checkpoint(
    source: Path, destination: Path, *, progress: Callable[[int, int], None] | None = None
) -> QuantizeReport:
    """Writes `source` with MXFP4 experts to `destination`, a new or an empty folder, and reports what it did.

    The same source gives the same bytes. Everything that can be refused is, before a byte is written, except values
    that are not finite. The folder appears under its name when it is complete. `progress(done, all)` counts bytes of
    the source's weights.

    FileExistsError for a destination that holds something; CheckpointError, naming file and tensor, for a source whose
    index or files are broken; InvalidArgument, naming the file or the tensor, for one that is quantised already, has no
    routed experts, or has some that cannot be MXFP4.
    """
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise FileExistsError(f"{destination} is not empty; give a new or an empty folder")
    config = _read_config(source)
    owners = _read_index(source)
    shards = [open_shard(path) for path in _shard_paths(source, owners)]
    _check_index(owners, shards)
    layers = {prefix: LayerReport(experts) for prefix, experts in _count_experts(shards).items()}
    if not layers:
        raise InvalidArgument("no tensor is a routed expert's weight", field="source", value=str(source))
    layouts = [layout_of(shard) for shard in shards]
    report = QuantizeReport(
        layers,
        bytes_before=sum(shard.size_bytes for shard in shards),
        bytes_after=sum(span.size_bytes for layout in layouts for span in layout.values()),
    )
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{destination.name}.", dir=destination.parent))
    try:
        mask = os.umask(0)
        os.umask(mask)
        partial.chmod(0o777 & ~mask)
        _write_weights(shards, layouts, partial, report, progress or (lambda done, total: None))
        _write_json(partial / CONFIG_NAME, config | {"quantization_config": quantization_config()})
        if owners is not None:
            index = json.loads((source / INDEX_NAME).read_text())
            names = {name: shard.path.name for shard, layout in zip(shards, layouts, strict=True) for name in layout}
            index["metadata"] = {**index.get("metadata", {}), "total_size": report.bytes_after}
            index["weight_map"] = dict(sorted(names.items()))
            _write_json(partial / INDEX_NAME, index)
        _copy_others(source, partial)
        partial.replace(destination)
    except BaseException:
        shutil.rmtree(partial)
        raise
    return report


def _write_weights(
    shards: list[Shard],
    layouts: list[dict[str, TensorSpan]],
    folder: Path,
    report: QuantizeReport,
    progress: Callable[[int, int], None],
) -> None:
    done = 0
    errors = {prefix: layer.errors for prefix, layer in report.layers.items()}
    for shard, layout in zip(shards, layouts, strict=True):
        for count in write_shard(shard, layout, folder / shard.path.name, errors):
            done += count
            progress(done, report.bytes_before)


def _copy_others(source: Path, folder: Path) -> None:
    """Tokenizer, templates and whatever else lies there; nothing hidden, and not what is written already."""
    for entry in sorted(source.iterdir()):
        if entry.name.startswith(".") or (folder / entry.name).exists():
            continue
        if entry.is_dir():
            shutil.copytree(entry, folder / entry.name)
        else:
            shutil.copyfile(entry, folder / entry.name)


def quantization_config() -> dict[str, Any]:
    """What goes into config.json: weights only, routed experts only, one e8m0 byte for 32 columns."""
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "group",
        "group_size": GROUP_SIZE,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer_kwargs": {},
        "scale_dtype": "torch.uint8",
        "zp_dtype": "torch.uint8",
    }
    group = {
        "targets": [TARGETS],
        "weights": weights,
        "input_activations": None,
        "output_activations": None,
        "format": FORMAT,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }


def _read_config(source: Path) -> dict[str, Any]:
    path = source / CONFIG_NAME
    try:
        config: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{path}: {error}") from error
    if not isinstance(config, dict):
        raise InvalidArgument(f"{path} is no JSON object")
    text = config.get("text_config") or {}
    if "quantization_config" in config or "quantization_config" in text:
        raise InvalidArgument(f"{path} has a quantization_config: the checkpoint is quantised already")
    return config


def _read_index(source: Path) -> dict[str, str] | None:
    """File of each tensor, or None where one file holds all."""
    path = source / INDEX_NAME
    return parse_index(path.read_bytes()) if path.is_file() else None


def _shard_paths(source: Path, owners: dict[str, str] | None) -> list[Path]:
    if owners is None:
        single = source / SINGLE_NAME
        if not single.is_file():
            raise IndexFault(str(source), f"has neither {INDEX_NAME} nor {SINGLE_NAME}")
        return [single]
    names = sorted(set(owners.values()))
    missing = [name for name in names if not (source / name).is_file()]
    if missing:
        raise ShardsMissing(str(source / INDEX_NAME), missing)
    return [source / name for name in names]


def _check_index(owners: dict[str, str] | None, shards: list[Shard]) -> None:
    """Each tensor of a file must be in the index and the other way round: all of them are rewritten."""
    if owners is None:
        return
    for shard in shards:
        file = shard.path.name
        require_tensors(file, (name for name, owner in owners.items() if owner == file), shard.header)
        for name in shard.header.tensors:
            if owners.get(name) != file:
                raise IndexFault(file, f"the index gives it to {owners.get(name, 'no file')}", name)


def _count_experts(shards: list[Shard]) -> dict[str, int]:
    """Experts of each layer by its prefix; InvalidArgument where a matrix is missing, twice there, or misshapen.

    Shapes that do not fit together are also how stacked experts of another layout, transposed, are told.
    """
    layers: dict[str, dict[str, tuple[int, int]]] = {}
    for matrix in (matrix for shard in shards for held in shard.experts.values() for matrix in held):
        shapes = layers.setdefault(matrix.prefix, {})
        if matrix.module in shapes:
            raise InvalidArgument(f"{matrix.module} is in the checkpoint twice")
        shapes[matrix.module] = (matrix.rows, matrix.columns)
    counts = {}
    for prefix, shapes in layers.items():
        counts[prefix] = -(-len(shapes) // 3)
        gate = shapes.get(f"{prefix}.0.gate_proj")
        for expert in range(counts[prefix]):
            for projection in ("gate_proj", "up_proj", "down_proj"):
                module = f"{prefix}.{expert}.{projection}"
                if module not in shapes:
                    raise InvalidArgument(f"{module} is missing, {prefix} has {len(shapes)} matrices")
                assert gate is not None
                wanted = gate[::-1] if projection == "down_proj" else gate
                if shapes[module] != wanted:
                    raise InvalidArgument(
                        f"{module} is {list(shapes[module])}, expert 0's gate_proj {list(gate)} needs {list(wanted)}"
                    )
    return counts


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
