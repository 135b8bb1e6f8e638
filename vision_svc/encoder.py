"""Runs upstream's glm5_next vision tower on patches; knows no image bytes, no queue and no service."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoConfig
from transformers.models.glm5_next.modeling_glm5_next import Glm5NextVisionModel

from svc_common.checkpoint_source import CheckpointSource
from svc_common.weight_stream import Progress
from vision_svc.processor import Patches
from vision_svc.weights import WeightsError, read_vision_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class EncodeError(Exception):
    """The tower gave no usable answer for an image; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class VisualTokens:
    """One image's visual tokens as they go on the wire.

    `data` is row-major [tokens, hidden] in the encoder's dtype, little-endian; `sha256` is over `data`. The grid is in
    patches before merging.
    """

    data: bytes
    tokens: int
    hidden: int
    grid_height: int
    grid_width: int
    sha256: bytes


class Encoder:
    """Upstream's vision tower and merger, unmodified, attention through torch SDPA, on the CPU.

    With `batch_invariant` each image of a batch is a forward of its own: a matrix library chooses its summation order
    by the number of rows, so an image's bits would otherwise depend on its neighbours. Without it a batch is one packed
    forward, which differs from the former by rounding only.
    """

    def __init__(
        self,
        source: CheckpointSource,
        *,
        dtype: str,
        batch_invariant: bool,
        progress: Progress | None = None,
    ) -> None:
        """Builds the tower from config.json and fills every parameter from the checkpoint.

        Raises WeightsError for another architecture, what `read_vision_weights` refuses, and any missing, unexpected
        or wrongly shaped tensor, by name.
        """
        config = AutoConfig.from_pretrained(str(source.folder), local_files_only=True)
        if config.model_type != "glm5_next":
            raise WeightsError(f"model_type is {config.model_type!r}; the vision service serves 'glm5_next'")
        self.architecture: str = (config.architectures or ["Glm5NextForConditionalGeneration"])[0]
        self.dtype = dtype
        self._batch_invariant = batch_invariant
        vision = config.vision_config
        self._tower = Glm5NextVisionModel._from_config(vision, dtype=DTYPES[dtype], attn_implementation="sdpa").eval()
        weights = read_vision_weights(source, progress)
        _fill(self._tower, weights.tensors)
        self.widest_weights = max(parameter.numel() for parameter in self._tower.parameters())
        """Elements of the largest parameter."""
        self.weight_files = weights.files
        self.hidden: int = vision.out_hidden_size
        self.merge_size: int = vision.spatial_merge_size
        self.patch_size: int = vision.patch_size
        self.temporal_patch_size: int = vision.temporal_patch_size
        self._patch_elements: int = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        settings = json.dumps(
            {"config": vision.to_dict(), "dtype": dtype, "invariant": batch_invariant}, sort_keys=True, default=str
        )
        self.fingerprint: bytes = hashlib.sha256(settings.encode() + weights.digest).digest()

    def token_count(self, patches: Patches) -> int:
        """Number of visual tokens of an image: its patches after merging."""
        return patches.count // self.merge_size**2

    def encode(self, images: Sequence[Patches]) -> list[VisualTokens | EncodeError]:
        """Encodes images in order; an image whose tokens are not all finite gets an EncodeError in its place."""
        assert images
        with torch.inference_mode():
            if self._batch_invariant:
                return [result for image in images for result in self._forward([image])]
            return self._forward(images)

    def warm_up(self) -> None:
        """One real forward on a grey picture of four tokens; raises EncodeError when the weights give no numbers."""
        side = 2 * self.merge_size
        grey = Patches(torch.zeros(side * side, self._patch_elements), side, side)
        (result,) = self.encode([grey])
        if isinstance(result, EncodeError):
            raise result

    def _forward(self, images: Sequence[Patches]) -> list[VisualTokens | EncodeError]:
        pixels = images[0].pixels if len(images) == 1 else torch.cat([image.pixels for image in images])
        grid = torch.tensor([[1, image.grid_height, image.grid_width] for image in images])
        rows = self._tower(pixels.to(DTYPES[self.dtype]), grid_thw=grid).pooler_output
        counts = [self.token_count(image) for image in images]
        assert rows.shape == (sum(counts), self.hidden), (rows.shape, counts)
        return [self._finish(image, part) for image, part in zip(images, rows.split(counts), strict=True)]

    def _finish(self, image: Patches, rows: torch.Tensor) -> VisualTokens | EncodeError:
        broken = int((~torch.isfinite(rows)).any(dim=1).sum())
        if broken:
            return EncodeError(f"{broken} of {rows.shape[0]} visual tokens are not finite")
        data = rows.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return VisualTokens(
            data=data,
            tokens=rows.shape[0],
            hidden=self.hidden,
            grid_height=image.grid_height,
            grid_width=image.grid_width,
            sha256=hashlib.sha256(data).digest(),
        )


def _fill(tower: torch.nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Copies every tensor into the tower; each parameter is written exactly once or WeightsError names it."""
    wanted = tower.state_dict()
    problems = [f"missing {name}" for name in sorted(wanted.keys() - tensors.keys())]
    problems += [f"unexpected {name}" for name in sorted(tensors.keys() - wanted.keys())]
    problems += [
        f"{name} has shape {tuple(tensors[name].shape)}, expected {tuple(wanted[name].shape)}"
        for name in sorted(wanted.keys() & tensors.keys())
        if tensors[name].shape != wanted[name].shape
    ]
    if problems:
        raise WeightsError("vision weights do not fit the tower: " + "; ".join(problems))
    tower.load_state_dict(tensors, strict=True)
