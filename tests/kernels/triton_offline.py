"""Compiles for an H200, without a GPU, exactly what a Triton launcher would launch; it knows no operator."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as HopperDescriptor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

TARGET = GPUTarget("cuda", 90, 32)
_NAMES = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.float8_e4m3fn: "*fp8e4nv",
}


@dataclass(frozen=True, slots=True)
class Launch:
    """One recorded launch: kernel, arguments by name, `num_warps` and the like, grid."""

    kernel: JITFunction
    arguments: Mapping[str, Any]
    options: Mapping[str, int]
    grid: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Machine:
    """What the assembler made: PTX, registers and bytes of local memory (spills) a thread, bytes of shared memory."""

    kernel: str
    ptx: str
    registers: int
    local_bytes: int
    shared_bytes: int


def recorded(call: Callable[[], Any]) -> list[Launch]:
    """The launches of a call on tensors of the meta device; none of them runs."""
    launches: list[Launch] = []

    def record(self: JITFunction, *args: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        named = {key: value for key, value in keywords.items() if key in self.arg_names}
        options = {key: value for key, value in keywords.items() if key not in named}
        launches.append(Launch(self, self.signature.bind(*args, **named).arguments, options, grid))

    with mock.patch.object(JITFunction, "run", record):
        call()
    return launches


def compiled(launch: Launch) -> Machine:
    """Machine code of a launch for sm_90, with the specialisations the launch would have had."""
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for i, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        special = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (isinstance(value, int) and value == 1 and special):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = _NAMES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            signature[parameter.name] = f"tensordesc<{_NAMES[value.base.dtype][1:]}{list(value.block_shape)}>"
        elif isinstance(value, HopperDescriptor):
            block = f"{_NAMES[value.base.dtype][1:]}{list(value.block_shape)}"
            signature[parameter.name] = f"tensordesc<{block},{value.layout!r}>"
        elif isinstance(value, int):
            signature[parameter.name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0 and special:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32"
    made_by = GluonASTSource if launch.kernel.is_gluon() else ASTSource
    source = made_by(launch.kernel, signature, constants, attributes)
    made = triton.compile(source, target=TARGET, options=dict(launch.options))
    registers, local_bytes = _resources(made.asm["cubin"])
    return Machine(launch.kernel.__name__, made.asm["ptx"], registers, local_bytes, made.metadata.shared)


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and local bytes a thread, as the tools beside Triton's own assembler report them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        done = subprocess.run(
            [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)],
            capture_output=True,
            text=True,
            check=True,
        )
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", done.stdout)}
    return found["REG"], found["STACK"] + found["LOCAL"]
