"""Gathers the font files and scikit-learn's digits into one folder that can travel to a machine without a network.

The packages are those of training/demo/requirements.txt. Usage: python -m training.demo.collect_assets [FOLDER]
"""

from __future__ import annotations

import argparse
import shutil
from importlib.util import find_spec
from pathlib import Path

from training.demo.faces import ASSETS, FACES

MAX_BYTES = 12 << 20
DIGITS = ("sklearn", "datasets/data/digits.csv.gz")


def package_folder(name: str) -> Path:
    """Where a package is installed; the package itself is not imported."""
    spec = find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(f"{name} is not installed; pip install -r training/demo/requirements.txt")
    return Path(next(iter(spec.submodule_search_locations)))


def collect(folder: Path) -> int:
    """Copy all files and return their bytes; raises ValueError where they are more than 12 MiB."""
    sources = [package_folder(face.package) / "files" / face.file for face in FACES]
    sources.append(package_folder(DIGITS[0]) / DIGITS[1])
    folder.mkdir(parents=True, exist_ok=True)
    for source in sources:
        shutil.copyfile(source, folder / source.name)
    size = sum(source.stat().st_size for source in sources)
    if size > MAX_BYTES:
        raise ValueError(f"assets have {size} bytes; at most {MAX_BYTES} can travel")
    return size


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=ASSETS)
    size = collect(parser.parse_args().folder)
    print(f"{len(FACES)} font files and the digits, {size / 2**20:.1f} MiB")
