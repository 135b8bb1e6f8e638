"""Prints what pyproject.toml requires, with the extras named; installs nothing, and knows the standard library alone.

Images install requirements in a layer below the code, so that a change of code leaves that layer as it is.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path


def requirements(pyproject: Path, extras: Sequence[str]) -> list[str]:
    """Requirements of the project and of its `extras`, each once, sorted. Raises ValueError for an unknown extra."""
    project = tomllib.loads(pyproject.read_text())["project"]
    known = project["optional-dependencies"]
    unknown = sorted(set(extras) - set(known))
    if unknown:
        raise ValueError(f"extras: {', '.join(unknown)} not in {pyproject}, which has {', '.join(sorted(known))}")
    return sorted({*project["dependencies"], *(line for extra in extras for line in known[extra])})


def main() -> int:
    """One requirement a line; 1 for an unknown extra."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pyproject", type=Path)
    parser.add_argument("extras", nargs="*", help="names of extras")
    given = parser.parse_args()
    try:
        print("\n".join(requirements(given.pyproject, given.extras)))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
