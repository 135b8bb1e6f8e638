"""Runs the router as a process: `python -m router_svc`; the only place here that reads the environment."""

from __future__ import annotations

import asyncio
import os
import sys

from router_svc.service import Router
from router_svc.settings import RouterSettings
from svc_common.logs import configure_logging
from svc_common.settings import SettingsError, read_settings


async def _run(settings: RouterSettings) -> None:
    await Router(settings).run()


def main() -> int:
    """Exit status: 0 after a drain, 1 when a port cannot be had, 2 for bad settings."""
    try:
        settings = read_settings(RouterSettings, os.environ)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    configure_logging("router", settings.log_format, settings.log_level)
    try:
        asyncio.run(_run(settings))
    except OSError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
