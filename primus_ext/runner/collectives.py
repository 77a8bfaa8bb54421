"""``primus-ext collectives``: measure the collectives of this machine and fit lines to them."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from primus_ext.collective_samples import SamplesError, load, save
from primus_ext.report import collectives as table
from primus_ext.runner import local_device
from primus_ext.runner.outcome import Exit, UsageError

_SWEEP = "primus_ext.observe.collective_sweep"


def command(out: Path, options: Sequence[str]) -> int:
    """Measure in processes of their own, add the fitted lines to the file, and show them.

    Args:
        out: The file.
        options: Of the sweep, as it takes them.

    Returns:
        The exit code: of a sweep that ends early its own, after what it measured is fitted.

    Raises:
        UsageError: There is a device that we have no figures of, so that no target could use it.
    """
    named = [*options]
    device = local_device.find(os.environ)
    if device is not None and "cpu" not in options and "--accelerator" not in options:
        if device.accelerator is None:
            raise UsageError(
                f"the local device {device.product!r} is none that primus_ext has figures for; "
                "add --accelerator NAME, the one that describes it, or --device cpu"
            )
        named += ["--accelerator", device.accelerator]
    before = _stamp(out)
    code = subprocess.run([sys.executable, "-m", _SWEEP, "--out", str(out), *named]).returncode
    if _stamp(out) == before:  # nothing was measured, the sweep has said why
        return code or Exit.INTERNAL
    fitted(out)
    return code


def _stamp(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def fitted(path: Path) -> None:
    """Add the lines to a file of measured times, and show them.

    Raises:
        UsageError: It holds none.
    """
    from primus_ext.cost.measured_collectives import MeasuredCollectives

    try:
        sweep = load(path)
        measured = MeasuredCollectives([sweep], path.name)
    except SamplesError as error:
        raise UsageError(str(error)) from error
    sweep = dataclasses.replace(sweep, fits=measured.fits())
    save(sweep, path)
    table.show(sweep)
