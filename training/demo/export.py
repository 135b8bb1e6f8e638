"""Writes trained weights as a Hugging Face folder, and makes the shipped checkpoint of it; it knows no training.

`pack` puts all but the weights into one archive, because a lent machine gives few files back; the command
`python -m training.demo.export PACKED SHIPPED` undoes that, quantises the experts, writes the manifest and checks the
size.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import Glm5NextConfig, Glm5NextForConditionalGeneration, PreTrainedTokenizerFast

from training.demo.model import build_generation_config, build_image_processor, keeps_float32

SHARD_SIZE = "15MB"
REST_NAME = "rest.tar"
MAX_CHECKPOINT_BYTES = 25 * 2**20


@torch.no_grad()
def write_checkpoint(
    folder: Path,
    config: Glm5NextConfig,
    tokenizer: PreTrainedTokenizerFast,
    weights: Mapping[str, Tensor],
    router_bias: Tensor,
) -> None:
    """Writes weights by upstream's names as bfloat16, float32 where upstream keeps it, in shards of at most 15 MB.

    `router_bias` is float32 `[layers, E]`. The folder is made; files of the same names are replaced.
    """
    model = Glm5NextForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        dtype = torch.float32 if keeps_float32(name) else torch.bfloat16
        if parameter.numel() and not torch.isfinite(weights[name]).all():
            raise ValueError(f"{name} is not finite")
        value = weights[name].detach().cpu() if parameter.numel() else parameter.detach()
        parameter.data = value.to(dtype).clone()
    for index, layer in enumerate(model.model.language_model.layers):
        layer.mlp.gate.e_score_correction_bias.data = router_bias[index].detach().float().cpu().clone()
    model.generation_config = build_generation_config(tokenizer)
    model.config.dtype = torch.bfloat16
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE)
    tokenizer.save_pretrained(folder)
    build_image_processor().save_pretrained(folder)


def pack(folder: Path, packed: Path) -> None:
    """Copies the shards of `folder` to `packed` and everything else into one archive beside them."""
    packed.mkdir(parents=True, exist_ok=True)
    for old in packed.glob("*.safetensors"):
        old.unlink()
    with tarfile.open(packed / REST_NAME, "w") as archive:
        for path in sorted(folder.iterdir()):
            if path.suffix == ".safetensors":
                shutil.copyfile(path, packed / path.name)
            else:
                archive.add(path, arcname=path.name)


def unpack(packed: Path, folder: Path) -> None:
    """The folder that `pack` was given, in a new folder."""
    folder.mkdir(parents=True)
    with tarfile.open(packed / REST_NAME) as archive:
        archive.extractall(folder, filter="data")
    for path in packed.glob("*.safetensors"):
        shutil.copyfile(path, folder / path.name)


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def ship(packed: Path, shipped: Path) -> dict[str, int]:
    """Makes the checkpoint that is shipped, golden logits and manifest included, and reports bytes.

    FileExistsError if `shipped` holds something; ValueError if it would be larger than 25 MiB.
    """
    from day0.quantize import quantize_checkpoint
    from svc_common.digests import make_manifest
    from svc_common.manifest import write_manifest
    from svc_common.object_store import ObjectStore
    from svc_common.piece_reader import ReadLimits
    from training.demo.golden import write_golden

    with tempfile.TemporaryDirectory() as scratch:
        plain = Path(scratch) / "plain"
        if (packed / REST_NAME).is_file():
            unpack(packed, plain)
        else:
            shutil.copytree(packed, plain)
        report = quantize_checkpoint(plain, shipped)
    write_golden(shipped)
    store = ObjectStore(str(shipped.resolve()))
    write_manifest(store, make_manifest(store, limits=ReadLimits(256 * 2**20)))
    total = folder_bytes(shipped)
    if total > MAX_CHECKPOINT_BYTES:
        raise ValueError(f"{shipped} has {total} bytes, more than {MAX_CHECKPOINT_BYTES}")
    return {"tensor_bytes_before": report.bytes_before, "tensor_bytes_after": report.bytes_after, "folder_bytes": total}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("packed", type=Path, help="folder from a training run, or a plain checkpoint folder")
    parser.add_argument("shipped", type=Path, help="new folder for the quantised checkpoint")
    options = parser.parse_args()
    print(json.dumps(ship(options.packed, options.shipped)))


if __name__ == "__main__":
    main()
