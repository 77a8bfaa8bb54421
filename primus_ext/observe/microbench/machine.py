"""The device at hand and its software, as plain values."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path
from typing import Any

import psutil
import torch

from primus_ext import this_machine

_FRAMEWORKS = ("megatron-core", "transformer-engine")


def described(device: torch.device) -> dict[str, Any]:
    """``device`` and ``versions``, each with the fields of the latency database."""
    return {
        "device": _cpu() if device.type == "cpu" else _gpu(device),
        "versions": {
            "torch": torch.__version__,
            "framework": ", ".join(filter(None, map(_version, _FRAMEWORKS))),
            "driver": _driver(device),
        },
    }


def free_bytes(device: torch.device) -> int:
    """Memory that tensors may still take."""
    if device.type == "cpu":
        return min(int(psutil.virtual_memory().available), this_machine.memory())
    return int(torch.cuda.mem_get_info(device)[0])


def clock_hz(device: torch.device) -> float:
    """The clock now; 0 where it can't be read."""
    try:
        if device.type == "cpu":
            found = psutil.cpu_freq()
            return float(found.current) * 1e6 if found else 0.0
        return float(torch.cuda.clock_rate(device)) * 1e6
    except Exception:  # no such file, or the vendor's library for it is not installed
        return 0.0


def _cpu() -> dict[str, Any]:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(errors="replace").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    frequency = psutil.cpu_freq()
    return {
        "product": names[0] if names else "unknown CPU",
        "kind": "cpu",
        "memory_bytes": this_machine.memory(),
        "units": this_machine.cores(),
        "threads": torch.get_num_threads(),
        "clock_hz": float(frequency.max) * 1e6 if frequency else 0.0,
    }


def _gpu(device: torch.device) -> dict[str, Any]:
    found = torch.cuda.get_device_properties(device)
    return {
        "product": found.name,
        "kind": "gpu",
        "memory_bytes": int(found.total_memory),
        "units": int(found.multi_processor_count),
        "threads": 0,
        "clock_hz": float(getattr(found, "clock_rate", 0)) * 1e3,
    }


def _driver(device: torch.device) -> str:
    if device.type == "cpu":
        return ""
    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    version = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
    return f"CUDA {torch.version.cuda}, driver for {version // 1000}.{version % 1000 // 10}"


def _version(package: str) -> str:
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return ""
