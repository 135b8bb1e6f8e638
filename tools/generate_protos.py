"""Generates the Python stubs of `protos/` with grpc_tools; knows nothing of what the messages mean."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parents[1]


def generate(out: Path) -> None:
    """Write the stubs of every `protos/*/v1/*.proto` below `out`. Raises RuntimeError with protoc's exit code."""
    sources = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "protos").glob("*/v1/*.proto"))
    well_known = Path(grpc_tools.__file__).parent / "_proto"
    flags = [f"--python_out={out}", f"--pyi_out={out}", f"--grpc_python_out={out}"]
    code = protoc.main(["protoc", "-I", str(ROOT), "-I", str(well_known), *flags, *sources])
    if code != 0:
        raise RuntimeError(f"protoc ended with {code} on {', '.join(sources)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Generate the Python stubs of protos/.")
    parser.add_argument("--out", type=Path, default=ROOT, help="folder that gets protos/...; the repository by default")
    generate(parser.parse_args().out.resolve())
    sys.exit(0)
