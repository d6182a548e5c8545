"""What a table of measured times has to say about the machine it was made on."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def machine_facts(packages: Sequence[str]) -> str:
    """One line: processor, cores that this process may use, Python, and the versions of ``packages``."""
    versions = [f"{name} {_version(name)}" for name in packages]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return ", ".join([_processor(), f"{cores} cores", f"Python {platform.python_version()}", *versions])


def load() -> str:
    """The load averages of the last 1, 5 and 15 minutes, as ``uptime`` shows them."""
    return " ".join(f"{average:.1f}" for average in os.getloadavg())


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(not installed)"


def _processor() -> str:
    facts = Path("/proc/cpuinfo")
    if facts.exists():
        for line in facts.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
