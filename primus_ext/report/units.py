"""Numbers as people read them."""

from __future__ import annotations

_GIB = float(2**30)


def gib(size: float) -> str:
    """Bytes in GiB: ``46.8 GiB``."""
    return f"{size / _GIB:.1f} GiB"


def seconds(value: float) -> str:
    """A duration with three digits that matter: ``17.6 s``, ``749 ms``, ``4.2 us``."""
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if abs(value) * scale >= 1 or unit == "us":
            break
    number = value * scale
    digits = 2 if abs(number) < 10 else 1 if abs(number) < 100 else 0
    return f"{number:.{digits}f} {unit}"


def count(value: int) -> str:
    """Parameters: ``70.55 B``, ``135.0 M``."""
    if value >= 1e9:
        return f"{value / 1e9:.2f} B"
    return f"{value / 1e6:.1f} M"


def percent(value: float) -> str:
    """A share: ``4.3 %``."""
    return f"{100 * value:.1f} %"
