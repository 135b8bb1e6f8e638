"""Turns an RGB picture into patches with upstream's own image processor; knows no bytes, no weights and no service."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers.models.glm5_next.image_processing_pil_glm5_next import Glm5NextImageProcessorPil

# The checkpoint may name the torchvision twin: it has the same configuration, and the PIL one is what we run.
_ACCEPTED_TYPES = ("Glm5NextImageProcessor", "Glm5NextImageProcessorPil")


@dataclass(frozen=True, slots=True)
class Patches:
    """One image, ready for the tower.

    `pixels` is float32 [grid_height * grid_width, channels * temporal_patch_size * patch_size**2]; the grid is counted
    in patches before merging, and has one frame.
    """

    pixels: torch.Tensor
    grid_height: int
    grid_width: int

    @property
    def count(self) -> int:
        """Number of patches."""
        return self.grid_height * self.grid_width


class PatchProcessor:
    """Upstream's PIL image processor as the checkpoint configures it.

    Small pictures are enlarged to `min_image_tokens`, large ones reduced to `max_image_tokens`, by upstream's rule, so
    every picture has at least one visual token.
    """

    def __init__(self, checkpoint: Path) -> None:
        """Reads preprocessor_config.json; raises ValueError when the checkpoint names another processor."""
        declared, _ = Glm5NextImageProcessorPil.get_image_processor_dict(str(checkpoint), local_files_only=True)
        kind = declared.get("image_processor_type")
        if kind not in _ACCEPTED_TYPES:
            raise ValueError(f"image_processor_type is {kind!r}, expected one of {', '.join(_ACCEPTED_TYPES)}")
        self._processor = Glm5NextImageProcessorPil.from_pretrained(str(checkpoint), local_files_only=True)
        self.merge_size: int = self._processor.merge_size
        self.patch_size: int = self._processor.patch_size
        self.temporal_patch_size: int = self._processor.temporal_patch_size
        self.max_patches: int = self._processor.max_image_tokens * self.merge_size**2
        self.fingerprint: bytes = hashlib.sha256(
            json.dumps(self._processor.to_dict(), sort_keys=True, default=str).encode()
        ).digest()

    def patch_count(self, image: Image.Image) -> int:
        """Number of patches that `image` will have, from its size alone."""
        return int(self._processor.get_number_of_image_patches(image.height, image.width))

    def __call__(self, image: Image.Image) -> Patches:
        """Resizes, normalises and cuts one RGB picture."""
        assert image.mode == "RGB", image.mode
        batch = self._processor(images=[image], return_tensors="np")
        frames, grid_height, grid_width = (int(side) for side in batch["image_grid_thw"][0])
        assert frames == 1 and grid_height * grid_width >= self.merge_size**2, (frames, grid_height, grid_width)
        pixels = np.asarray(batch["pixel_values"], dtype=np.float32)
        assert pixels.shape[0] == grid_height * grid_width, pixels.shape
        # A torch allocation has one alignment; a numpy one may not, and the matrix library's bits depend on it.
        return Patches(torch.from_numpy(pixels).clone(), grid_height, grid_width)
