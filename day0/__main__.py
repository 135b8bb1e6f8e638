"""Entry point of `day0` and `python -m day0`; the only module here that reads the environment."""

from __future__ import annotations

import os
import sys

from day0.cli import run


def main() -> None:
    """Run the command line and exit."""
    sys.exit(run(sys.argv[1:], os.environ))


if __name__ == "__main__":
    main()
