"""Runs the language service as a process: `python -m llm_svc`; the only place here that reads the environment."""

from __future__ import annotations

import asyncio
import os
import sys

from llm_svc.settings import LlmSettings
from svc_common.logs import configure_logging, get_logger
from svc_common.process_end import end_process
from svc_common.settings import SettingsError, read_settings


def main() -> int:
    """Exit status: 0 after a drain, 1 when loading or a port failed or the engine died, 2 for a bad setting."""
    try:
        settings = read_settings(LlmSettings, os.environ)
    except SettingsError as error:
        print(error, file=sys.stderr)
        return 2
    configure_logging("llm", settings.log_format, settings.log_level)
    # After the settings were checked: torch and transformers take seconds to import.
    from llm_svc.service import LanguageModelService

    try:
        asyncio.run(LanguageModelService(settings).run())
    except Exception as error:
        get_logger("day0.llm").error("the service failed: %s", error, exc_info=error)
        return 1
    return 0


if __name__ == "__main__":
    end_process(main())
