"""The language service's settings, read once at start."""

from __future__ import annotations

import os
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from svc_common.discovery_settings import DiscoverySettings
from svc_common.settings import ServiceSettings
from svc_common.targets import Target


class LlmSettings(DiscoverySettings, ServiceSettings):
    """Environment variables `DAY0_LLM_<FIELD>`."""

    model_config = SettingsConfigDict(env_prefix="DAY0_LLM_", frozen=True, extra="forbid")

    model: Annotated[str, BeforeValidator(os.fspath)] = Field(
        description="Checkpoint in the Hugging Face layout: a folder, or file://, s3://, gs://, az://."
    )
    load_format: Literal["checkpoint", "dummy"] = Field(
        "checkpoint", description="dummy makes random weights from the config alone, to measure shapes."
    )
    model_name: str = Field("", description="Name under which it is served; by default the folder's name.")
    require_manifest: bool = Field(False, description="Refuse a checkpoint without day0-manifest.json.")
    load_budget_bytes: int = Field(
        512 * 1024 * 1024, ge=1, description="Bytes held while weights are read, beyond the model itself."
    )
    max_memory_bytes: int = Field(
        0, ge=0, description="Memory of the device for weights and caches; 0: what is available at start."
    )
    tier: Literal["auto", "native", "upstream"] = Field(
        "auto", description="auto takes native for adopted families and upstream for all others."
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="Where the model runs; cuda is the process' first GPU.")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="Dtype of weights and activations.")
    decode_graphs: Literal["auto", "off"] = Field(
        "auto", description="auto captures decode steps as CUDA graphs before ready; off launches them from Python."
    )
    threads: int = Field(0, ge=0, le=1024, description="Threads of a product; 0 chooses by the model's size.")
    vision_target: str = Field(
        "",
        description="Vision services: host:port, dns:///name:port or kubernetes:///service.namespace:port; "
        "empty serves text only.",
    )

    experts_residency: Literal["device", "host"] = Field(
        "device", description="Where MXFP4 experts live; host keeps the active ones of each layer in device slots."
    )
    experts_device_slots: int = Field(
        32, ge=1, description="Experts of a layer on the device where experts_residency is host."
    )
    experts_convert_tokens: int = Field(
        -1, ge=-1, description="Tokens of a forward from which MXFP4 experts go through FP8; 0: never, -1: measured."
    )
    experts_workspace_bytes: int = Field(
        1024 * 1024 * 1024, ge=1, description="FP8 scratch at most; experts are converted in groups that fit."
    )

    block_size: int = Field(64, ge=1, le=4096, description="Tokens in a cache block.")
    cache_tokens: int = Field(65536, ge=1, description="Tokens that all cache blocks hold together.")
    max_snapshots: int = Field(64, ge=0, le=65536, description="Recurrent states kept for prefix reuse.")
    prefix_cache: bool = Field(True, description="Reuse the blocks and states of earlier prompts.")
    max_running_sequences: int = Field(64, ge=1, le=4096, description="Sequences in a forward at most.")
    max_batch_tokens: int = Field(2048, ge=1, description="Tokens in a forward at most.")
    prefill_chunk_tokens: int = Field(
        512, ge=0, description="Prompt tokens of one sequence in a forward; 0: all that fit."
    )
    max_context_tokens: int = Field(0, ge=0, description="Bound on prompt and answer; 0: the model's own.")

    max_open_requests: int = Field(512, ge=1, le=65536, description="Requests accepted at once, waiting ones included.")
    output_buffer_tokens: int = Field(64, ge=1, le=65536, description="Tokens that may wait for a slow reader.")
    max_output_tokens: int = Field(16384, ge=1, description="Bound on max_tokens of a request, and its default.")
    max_total_output_tokens: int = Field(262144, ge=1, description="Bound on n * max_tokens.")
    max_prompt_bytes: int = Field(8 * 1024 * 1024, ge=1, description="Text of a prompt.")
    max_images: int = Field(32, ge=0, le=4096, description="Images in a request.")
    max_total_image_bytes: int = Field(48 * 1024 * 1024, ge=1, description="Encoded images of a request together.")
    template_seconds: float = Field(
        2.0, gt=0, le=60, description="Processor time of one rendering of the chat template."
    )

    @field_validator("vision_target")
    @classmethod
    def _target(cls, value: str) -> str:
        if value:
            Target.parse(value)
        return value

    @model_validator(mode="after")
    def _sizes_agree(self) -> LlmSettings:
        if self.cache_tokens < self.block_size:
            raise ValueError(f"cache_tokens {self.cache_tokens} must be at least block_size {self.block_size}")
        return self
