"""Prices of matrix products by other packages (entry points ``primus_ext.gemm_backends``).

A package names a callable under that group; it gets the accelerator and the op and returns a
:class:`~primus_ext.cost.priced.Priced`, or None for what it does not know.  The one to use is named
in ``gemm_backend`` of :class:`~primus_ext.cost.model.CostModel`; nothing is picked by being there.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable

from primus_ext.cluster import Accelerator
from primus_ext.cost.priced import CostError, Priced
from primus_ext.trace import Op

GROUP = "primus_ext.gemm_backends"
Backend = Callable[[Accelerator, Op], Priced | None]


def backend(name: str) -> Backend:
    """The backend that an installed package registers as ``name``.

    Raises:
        CostError: None does, or it can't be imported.
    """
    known = {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}
    point = known.get(name)
    if point is None:
        legal = ", ".join(sorted(known)) or "none is installed"
        raise CostError(f"gemm_backend={name} is not known: legal are the entry points of {GROUP}: "
                        f"{legal}")  # fmt: skip
    try:
        return point.load()
    except (ImportError, AttributeError) as error:
        raise CostError(f"gemm_backend={name} can't be used: {point.value}: {error}") from error
