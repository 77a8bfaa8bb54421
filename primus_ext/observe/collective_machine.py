"""The machine that collectives are measured on."""

from __future__ import annotations

import dataclasses
import os
import platform
from pathlib import Path
from typing import Any

import torch
import torch.cuda.nccl as nccl

from primus_ext import this_machine


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What a file of measured times says of it."""

    product: str
    cores: int
    versions: dict[str, str]
    settings: dict[str, Any]


def default_device() -> str:
    """``cuda`` (ROCm goes by that name too) where there is one, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def devices(device: str) -> int | None:
    """Devices of a kind; None where processes share the host."""
    return torch.cuda.device_count() if device == "cuda" else None


def default_processes(device: str) -> int:
    """One a device, or one a core."""
    return devices(device) or max(2, this_machine.cores())


def describe(device: str) -> Machine:
    """The machine as it is now."""
    versions = {"torch": str(torch.__version__)}
    if device == "cuda":
        product = torch.cuda.get_device_name()
        if torch.version.hip:
            versions["hip"] = torch.version.hip
        elif torch.version.cuda:
            versions["cuda"] = torch.version.cuda
        versions["nccl"] = ".".join(map(str, nccl.version()))
    else:
        product = _processor()
        versions["kernel"] = platform.release()
    settings = {
        "threads_per_process": int(os.environ.get("OMP_NUM_THREADS") or torch.get_num_threads()),
        "load_before": [round(load, 2) for load in os.getloadavg()],
    }
    return Machine(product, this_machine.cores(), versions, settings)


def _processor() -> str:
    """As the kernel names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
