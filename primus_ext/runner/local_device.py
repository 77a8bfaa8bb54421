"""Which accelerator is in this machine, asked without importing torch."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

# Product names as nvidia-smi and the amdgpu driver give them ("NVIDIA H100 80GB HBM3",
# "NVIDIA A100-SXM4-80GB", "AMD Instinct MI300X"), to the names of our accelerator files.  Kinds
# with other memory or bandwidth than those files describe (PCIe and NVL cards, the A100 with
# 40 GB, the GH200) are left out on purpose: they have no figures.
_PRODUCTS = (
    (r"A100-SXM4-80GB", "a100"),
    (r"H100 80GB HBM3", "h100"),
    (r"\bH200\b(?! NVL)", "h200"),
    (r"\bB200\b", "b200"),
    (r"\bMI300X\b", "mi300x"),
    (r"\bMI325X\b", "mi325x"),
    (r"\bMI355X\b", "mi355x"),
)
_QUERY = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
_AMD_NAMES = "class/drm/card*/device/product_name"
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


@dataclasses.dataclass(frozen=True, slots=True)
class LocalDevice:
    """The accelerators that this process may use."""

    product: str
    """The vendor's name for it."""
    accelerator: str | None
    """Our name for it; None for a product that we have no figures of."""
    count: int


def find(environment: Mapping[str, str], sysfs: Path = Path("/sys")) -> LocalDevice | None:
    """The local accelerator, None where there is none or none is visible.

    Args:
        environment: ``os.environ``; an empty ``*_VISIBLE_DEVICES`` hides every device, a list
            shows that many.
        sysfs: Where the kernel's device tree is mounted.
    """
    names = _nvidia_names() or _amd_names(sysfs)
    limits = [environment[key] for key in _VISIBLE if key in environment]
    count = min([len(names), *(len([i for i in v.split(",") if i.strip()]) for v in limits)])
    if count == 0:
        return None
    return LocalDevice(names[0], accelerator_of(names[0]), count)


def accelerator_of(product: str) -> str | None:
    """Our name for a vendor's product name, None where we have no figures of it."""
    found = (name for pattern, name in _PRODUCTS if re.search(pattern, product))
    return next(found, None)


def _nvidia_names() -> list[str]:
    if shutil.which(_QUERY[0]) is None:
        return []
    try:
        asked = subprocess.run(_QUERY, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return asked.stdout.splitlines() if asked.returncode == 0 else []


def _amd_names(sysfs: Path) -> list[str]:
    names = (path.read_text().strip() for path in sorted(sysfs.glob(_AMD_NAMES)))
    return [name for name in names if "Instinct" in name]
