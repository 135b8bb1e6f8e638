"""Settings of the vision service, environment prefix DAY0_VISION_; knows no default that depends on the machine."""

from __future__ import annotations

import os
from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_settings import SettingsConfigDict

from svc_common.settings import ServiceSettings
from vision_svc.decode import DecodeRules

Channel = Annotated[int, Field(ge=0, le=255)]
# What a request needs beside the image: its label and the framing.
_REQUEST_OVERHEAD_BYTES = 4096


class VisionSettings(ServiceSettings):
    """Everything that can be set; sizes and limits are per image unless they say otherwise."""

    model_config = SettingsConfigDict(env_prefix="DAY0_VISION_")

    model: Annotated[str, BeforeValidator(os.fspath)] = Field(
        description="Checkpoint in the Hugging Face layout: a folder, or file://, s3://, gs://, az://."
    )
    model_name: str = Field("", description="Name under which the model is served; empty takes the folder's name.")
    require_manifest: bool = Field(False, description="Refuse a checkpoint without day0-manifest.json.")
    load_budget_bytes: int = Field(
        512 * 1024**2, ge=1, description="Bytes held while weights are read, beyond the model itself."
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Of the tower and of the tokens sent.")
    batch_invariant: bool = Field(
        True, description="An image's bits never depend on its batch neighbours: one forward for each image of a batch."
    )
    encode_threads: int = Field(0, ge=0, le=1024, description="Threads of a product; 0 chooses by the model's size.")
    decode_threads: int = Field(2, ge=1, le=256, description="Images decoded at once.")

    max_image_bytes: int = Field(20 * 1024**2, ge=1, description="Encoded size.")
    max_image_pixels: int = Field(50_000_000, ge=1, description="Width times height, read from the header.")
    max_frames: int = Field(1, ge=1, le=10_000, description="Frames of a file; the first one is used.")
    max_aspect_ratio: float = Field(200, ge=1, allow_inf_nan=False, description="Longer side divided by shorter side.")
    background: tuple[Channel, Channel, Channel] = Field(
        (255, 255, 255), description="Red, green, blue that shows where an image is transparent."
    )

    batch_wait_ms: float = Field(
        4, ge=0, le=10_000, allow_inf_nan=False, description="How long a first image waits for company."
    )
    patch_budget: int = Field(32_768, ge=1, description="Patches of one batch; an image above it is refused.")
    max_waiting_patches: int = Field(65_536, ge=1, description="Patches prepared ahead; above it decoding pauses.")
    max_waiting_images: int = Field(512, ge=1, description="Distinct images being worked on, over all requests.")
    max_waiting_bytes: int = Field(1024**3, ge=1, description="Encoded bytes of those images, over all requests.")
    cache_bytes: int = Field(256 * 1024**2, ge=0, description="Visual tokens kept for repeated images; 0 keeps none.")

    @model_validator(mode="after")
    def _image_fits_message(self) -> Self:
        needed = self.max_image_bytes + _REQUEST_OVERHEAD_BYTES
        if needed > self.max_message_bytes:
            raise ValueError(
                f"max_image_bytes {self.max_image_bytes} does not fit max_message_bytes {self.max_message_bytes}: "
                f"a request needs {_REQUEST_OVERHEAD_BYTES} bytes more than its image"
            )
        if self.max_image_bytes > self.max_waiting_bytes:
            raise ValueError(
                f"max_waiting_bytes {self.max_waiting_bytes} is below max_image_bytes {self.max_image_bytes}"
            )
        return self

    @property
    def decode_rules(self) -> DecodeRules:
        """The part that `decode` obeys."""
        return DecodeRules(
            max_image_bytes=self.max_image_bytes,
            max_image_pixels=self.max_image_pixels,
            max_frames=self.max_frames,
            max_aspect_ratio=self.max_aspect_ratio,
            background=self.background,
        )
