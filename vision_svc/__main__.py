"""Runs the vision service: `python -m vision_svc`; the only module here that reads the environment."""

from __future__ import annotations

import asyncio
import os
import sys

from svc_common.logs import configure_logging, get_logger
from svc_common.process_end import end_process
from svc_common.settings import SettingsError, read_settings
from vision_svc.settings import VisionSettings


def main() -> int:
    """Exit status: 0 after a drain, 1 when loading or a port failed, 2 for a bad setting."""
    try:
        settings = read_settings(VisionSettings, os.environ)
    except SettingsError as error:
        print(f"vision_svc: {error}", file=sys.stderr)
        return 2
    configure_logging("vision", settings.log_format, settings.log_level)
    from vision_svc.launch import VisionLauncher

    try:
        asyncio.run(VisionLauncher(settings).run())
    except Exception as error:
        get_logger("day0.vision").error("the service failed: %s", error, exc_info=error)
        return 1
    return 0


if __name__ == "__main__":
    end_process(main())
