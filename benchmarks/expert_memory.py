"""Measures the memory of one glm5_next layer's routed experts: MXFP4 with its workspace, FP8, BF16; serves no model.

Run it from the repository with `python -m benchmarks.expert_memory`. Each case is a process of its own, one after the
other; the largest needs about 14 GiB.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from day0.bench.machine import environment

GIB = 2**30
LIMIT_BYTES = 18 * GIB
# Interpreter, torch, transformers and one expert widened to float32.
BESIDE_BYTES = 2 * GIB
SECONDS_LIMIT = 3600


def shape_and_layers(experts: int) -> tuple[Any, int]:
    """The routed experts of a layer as upstream's configuration has them by default, and how many layers have them."""
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig

    from llm_svc.adopt.packed_experts import expert_shape

    config = Glm5NextTextConfig()
    if experts:
        config.n_routed_experts = experts
    return expert_shape(config), config.mlp_layer_types.count("sparse")


def computed(options: argparse.Namespace) -> dict[str, Any]:
    """Bytes by arithmetic alone, for a layer and for a model."""
    from llm_svc.expert_memory import plan_experts
    from llm_svc.settings import LlmSettings

    shape, layers = shape_and_layers(options.experts)
    settings = LlmSettings(model="unused", experts_workspace_bytes=options.workspace_bytes)
    plan = plan_experts(settings, shape, layers)
    values = shape.experts * 3 * shape.hidden * shape.intermediate
    blocks = shape.experts * 3 * -(-shape.hidden // 128) * -(-shape.intermediate // 128)
    layer_bytes = {
        "mxfp4": shape.experts * shape.packed_bytes,
        "fp8": values + 4 * blocks,
        "bf16": 2 * values,
    }
    slots = plan_experts(LlmSettings(model="unused", experts_residency="host"), shape, layers)
    return {
        "experts": shape.experts,
        "top_k": shape.top_k,
        "hidden": shape.hidden,
        "intermediate": shape.intermediate,
        "layers": layers,
        "layer_bytes": layer_bytes,
        "model_bytes": {name: layers * size for name, size in layer_bytes.items()},
        "workspace_bytes": plan.workspace_bytes,
        "workspace_experts": plan.experts_at_once,
        "workspace_whole_layer_bytes": shape.experts * shape.largest_matrix_bytes,
        "host_residency_slots": slots.slots,
        "host_residency_slot_bytes": slots.slot_bytes,
    }


def _random(torch: Any, *sides: int, dtype: Any = None) -> Any:
    return torch.empty(sides, dtype=dtype or torch.uint8).random_()


def hold_mxfp4(shape: Any, options: argparse.Namespace) -> tuple[int, Callable[[], dict[str, Any]]]:
    """Packed experts and the workspace; then both ways once, over more experts than the workspace holds."""
    import torch

    from llm_svc.adopt.operators import resolve_operators
    from llm_svc.adopt.packed_product import PackedProduct
    from llm_svc.expert_memory import plan_experts
    from llm_svc.expert_residency import DeviceExperts, ExpertCounts
    from llm_svc.expert_setup import arena
    from llm_svc.formats.mxfp4 import PackedExperts, PackedWeight
    from llm_svc.settings import LlmSettings

    def weight(rows: int, columns: int) -> Any:
        scales = torch.empty(shape.experts, rows, columns // 32, dtype=torch.uint8).random_(118, 124)
        return PackedWeight(_random(torch, shape.experts, rows, columns // 2), scales)

    packed = PackedExperts(weight(2 * shape.intermediate, shape.hidden), weight(shape.hidden, shape.intermediate))
    settings = LlmSettings(model="unused", experts_workspace_bytes=options.workspace_bytes)
    plan = plan_experts(settings, shape, 1)
    device = torch.device("cpu")
    operators, resolved = resolve_operators(device, torch.float32)
    workspace = arena(device, resolved, settings, plan)
    workspace._arena.fill_(0)
    resident = DeviceExperts(packed)
    held = sum(t.nbytes for w in (packed.gate_up, packed.down) for t in (w.codes, w.scales)) + workspace.capacity_bytes

    def call() -> dict[str, Any]:
        kept = resident.find_lossless()
        active = min(shape.experts, plan.experts_at_once + 8)
        offsets = torch.arange(shape.experts + 1).clamp(max=active).int()
        placed = resident.on_device(offsets)
        rows = torch.randn(active, shape.hidden, generator=torch.Generator().manual_seed(0))
        seconds, outputs = {}, []
        for way, converts in (("fused", False), ("converted", True)):
            counts = ExpertCounts()
            product = PackedProduct(
                operators, workspace, counts, convert_tokens=1, experts_at_once=plan.experts_at_once
            )
            started = time.perf_counter()
            outputs.append(product(rows, placed.gate_up, placed.offsets, converts=converts))
            seconds[way] = time.perf_counter() - started
        return {
            "active_experts": active,
            "experts_kept_mxfp4": kept,
            "same_bits": bool(torch.equal(outputs[0].view(torch.int32), outputs[1].view(torch.int32))),
            "gate_up_seconds": seconds,
            "workspace_bytes": workspace.capacity_bytes,
            "workspace_high_water_bytes": workspace.high_water_bytes,
        }

    return held, call


def hold_fp8(shape: Any, options: argparse.Namespace) -> tuple[int, Callable[[], dict[str, Any]]]:
    """Every expert in FP8 with one scale a block."""
    import torch

    held = []
    for rows, columns in ((2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate)):
        held.append(_random(torch, shape.experts, rows, columns))
        held.append(torch.rand(shape.experts, -(-rows // 128), -(-columns // 128)))
    return sum(tensor.nbytes for tensor in held), lambda: {"tensors": len(held)}


def hold_bf16(shape: Any, options: argparse.Namespace) -> tuple[int, Callable[[], dict[str, Any]]]:
    """Every expert in BF16: random bits, since only their number matters."""
    import torch

    held = [
        _random(torch, shape.experts, rows, columns, dtype=torch.int16).view(torch.bfloat16)
        for rows, columns in ((2 * shape.intermediate, shape.hidden), (shape.hidden, shape.intermediate))
    ]
    return sum(tensor.nbytes for tensor in held), lambda: {"tensors": len(held)}


CASES = {"mxfp4": hold_mxfp4, "fp8": hold_fp8, "bf16": hold_bf16}


def measured(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Resident memory of this process before, with the weights, and at its peak."""
    import torch

    import llm_svc.expert_setup  # noqa: F401  What every case has in memory beside its weights.

    torch.set_num_threads(options.threads)
    shape, _ = shape_and_layers(options.experts)
    process = psutil.Process()
    before = process.memory_info().rss
    tensor_bytes, call = CASES[name](shape, options)
    resident = process.memory_info().rss
    called = call()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "case": name,
        "tensor_bytes": tensor_bytes,
        "rss_before_bytes": before,
        "rss_bytes": resident,
        "rss_added_bytes": resident - before,
        "peak_rss_bytes": peak,
        **called,
    }


def child(case: str, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one case from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.expert_memory", "--case", case, "--threads", str(options.threads)]
    command += ["--experts", str(options.experts), "--workspace-bytes", str(options.workspace_bytes)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=SECONDS_LIMIT, check=True)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.expert_memory", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--experts", type=int, default=0, help="experts of the layer; 0: as the model has")
    parser.add_argument("--workspace-bytes", type=int, default=GIB, help="FP8 scratch (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default %(default)s)")
    parser.add_argument("--out", type=Path, help="where to write all figures as JSON")
    parser.add_argument("--case", choices=("computed", *CASES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        found = computed(options) if options.case == "computed" else measured(options.case, options)
        print(json.dumps(found))
        return 0
    figures: dict[str, Any] = {"computed": child("computed", options), "measured": []}
    for case in CASES:
        needed = figures["computed"]["layer_bytes"][case] + BESIDE_BYTES
        needed += options.workspace_bytes if case == "mxfp4" else 0
        available = psutil.virtual_memory().available
        if needed > min(available, LIMIT_BYTES):
            print(f"{case}: needs {needed / GIB:.1f} GiB, {available / GIB:.1f} are available and 18 allowed")
            return 1
        figures["measured"].append(child(case, options))
        print(json.dumps(figures["measured"][-1]), flush=True)
    figures["environment"] = environment()
    if options.out is not None:
        options.out.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
