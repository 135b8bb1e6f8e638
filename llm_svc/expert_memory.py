"""What packed experts take beside their weights: FP8 scratch and device slots. Counts bytes and knows no tensor."""

from __future__ import annotations

from dataclasses import dataclass

from day0_kernels.spec import ScratchSpec
from day0_kernels.workspace import Reservation
from llm_svc.settings import LlmSettings

FP8_SCRATCH = "experts_fp8"


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The routed experts of one layer: how many, how many a token takes, and the sides of their matrices.

    The larger matrix of an expert is gate and up in one, `[2 * intermediate, hidden]`; down is
    `[hidden, intermediate]`.
    """

    experts: int
    top_k: int
    hidden: int
    intermediate: int

    @property
    def packed_bytes(self) -> int:
        """One expert in MXFP4: half a byte a value and one a group of 32."""
        values = 3 * self.hidden * self.intermediate
        return values // 2 + values // 32

    @property
    def largest_matrix_bytes(self) -> int:
        """Gate and up of one expert in FP8, without the few bytes of its scales."""
        return 2 * self.intermediate * self.hidden


@dataclass(frozen=True, slots=True)
class ExpertMemory:
    """What the settings ask for: the slots of each layer (0: all experts stay on the device) and the FP8 scratch."""

    shape: ExpertShape
    layers: int
    slots: int
    experts_at_once: int

    @property
    def places(self) -> int:
        """Experts of a layer that a product finds on the device."""
        return self.slots or self.shape.experts

    @property
    def slot_bytes(self) -> int:
        """The slots of all layers."""
        return self.layers * self.slots * self.shape.packed_bytes

    @property
    def reserved(self) -> dict[str, Reservation]:
        """The FP8 scratch by its name; nothing where experts are never converted."""
        if not self.experts_at_once:
            return {}
        scratch = ScratchSpec("fp8", ("experts", "rows", "columns"), "uint8")
        sizes = {"experts": self.experts_at_once, "rows": 2 * self.shape.intermediate, "columns": self.shape.hidden}
        return {FP8_SCRATCH: Reservation((scratch,), sizes)}

    @property
    def workspace_bytes(self) -> int:
        """Bytes of the FP8 scratch."""
        return sum(reservation.size_bytes for reservation in self.reserved.values())


def plan_experts(settings: LlmSettings, shape: ExpertShape, layers: int) -> ExpertMemory:
    """Slots and scratch of `layers` layers of packed experts; ValueError names the setting that is too small.

    The scratch holds as many experts as one forward can reach, within `experts_workspace_bytes`.
    """
    slots = 0
    if settings.experts_residency == "host":
        slots = min(settings.experts_device_slots, shape.experts)
        if slots < shape.top_k:
            raise ValueError(
                f"experts_device_slots {settings.experts_device_slots} must be at least {shape.top_k}, the experts "
                "that one token takes"
            )
    at_once = 0
    if settings.experts_convert_tokens:
        fitting = settings.experts_workspace_bytes // shape.largest_matrix_bytes
        if not fitting:
            raise ValueError(
                f"experts_workspace_bytes {settings.experts_workspace_bytes} must be at least "
                f"{shape.largest_matrix_bytes}, one expert; or set experts_convert_tokens to 0"
            )
        at_once = min(slots or shape.experts, settings.max_batch_tokens * shape.top_k, fitting)
    return ExpertMemory(shape, layers, slots, at_once)
