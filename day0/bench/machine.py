"""Says on what machine and with which versions a measurement was made; measures nothing."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from svc_common.versions import versions_of


def environment() -> dict[str, str]:
    """Facts a reader needs to repeat a measurement, by name."""
    return {
        "cpu": cpu_model(),
        "cores": str(os.cpu_count()),
        "os": operating_system(),
        "python": platform.python_version(),
        **versions_of("torch", "transformers", "grpcio", "day0"),
    }


def load_average() -> float:
    """Processes that ran or wanted to run, mean of the last minute: above 0 before a measurement, others disturb it."""
    return round(os.getloadavg()[0], 2)


def cpu_model() -> str:
    """Name of the processor, as the kernel says it where it does."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def operating_system() -> str:
    """Distribution, or the system's name where it does not say."""
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()
