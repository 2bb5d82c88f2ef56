"""What a figure belongs to: the machine, its load, and the versions of what was run."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version


def machine(*packages: str) -> str:
    """One line for the head of a table. packages: those whose versions matter."""
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    found = "; ".join(f"{package} {version(package)}" for package in packages)
    return (
        f"{model}, {os.cpu_count()} cores, load {load}; Linux {platform.release()}; "
        f"Python {platform.python_version()}{'; ' if found else ''}{found}"
    )
