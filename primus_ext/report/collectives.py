"""Fitted lines of measured collectives, on the terminal."""

from __future__ import annotations

from primus_ext.collective_samples import Sweep

_UNITS = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def show(sweep: Sweep) -> None:
    """Print a line for each kind and group: start and bandwidth of its pieces, residual."""
    print(f"{sweep.backend} on {sweep.product}, {sweep.processes} processes")
    for fit in sweep.fits:
        name = " ".join(part for part in (fit["variant"], fit["kind"], fit["dtype"]) if part)
        pieces = [
            f"{line['start_s'] * 1e6:.0f} us{_speed(line['s_per_byte'])}{_upto(line['upto_bytes'])}"
            for line in fit["lines"]
        ]
        told = f"{name:26} {fit['members']:3}  +-{fit['residual']:6.1%}  {'; '.join(pieces)}"
        print(told)
    for failure in sweep.failures:
        print(f"not measured: {failure}")


def _speed(seconds_per_byte: float) -> str:
    return f" + {1e-9 / seconds_per_byte:.2f} GB/s" if seconds_per_byte else ""


def _upto(size: float | None) -> str:
    if size is None:
        return ""
    unit, name = next(((u, n) for u, n in _UNITS if size >= u), (1, "B"))
    return f" up to {size / unit:.0f} {name}"
