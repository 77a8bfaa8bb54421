"""CUDA graphs: the job is traced without them, and the plan says what they would hold.

A graph changes who issues the kernels, not which ones run: the trace of a program is the same with
and without.  Their memory pools are not modelled; the projection says so.
"""

from __future__ import annotations

from typing import Any

_NONE = "none"


def _modules(value: Any) -> str:
    values = [value] if isinstance(value, str) or not hasattr(value, "__iter__") else list(value)
    return ",".join(str(getattr(one, "name", one)) for one in values if one is not None)


def set_aside(args: Any, container: Any) -> dict[str, Any]:
    """Switch graphs off, before the model is built; what they were is returned as flags of a plan.

    Args:
        args: Megatron's validated arguments; changed.
        container: What the entry point was called with; the transformer configs in it are changed.
    """
    args.te_rng_tracker = False  # its states are a device's; what is drawn is of no matter here
    model = getattr(container, "model", None)
    holders: list[Any] = [
        holder
        for holder in (args, model, getattr(model, "transformer", None))
        if getattr(holder, "cuda_graph_impl", None)
    ]
    used = next((h for h in holders if h.cuda_graph_impl != _NONE), None)
    if used is None:
        return {}
    told = {
        "cuda_graph_impl": str(used.cuda_graph_impl),
        "cuda_graph_modules": _modules(getattr(used, "cuda_graph_modules", None) or ()),
    }
    for holder in holders:
        holder.cuda_graph_impl = _NONE
        if getattr(holder, "cuda_graph_modules", None):
            holder.cuda_graph_modules = []
    return told
