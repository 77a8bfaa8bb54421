"""Activation recomputation of a run."""

from __future__ import annotations

from primus_ext.frameworks.published import torchtitan
from primus_ext.frameworks.published.draft import Draft, NotProjectable


def write(draft: Draft) -> None:
    """Arguments of the recomputation.

    Raises:
        NotProjectable: a granularity that Megatron-LM lacks.
    """
    recompute = draft.run["recompute"]
    granularity = recompute.get("granularity")
    if granularity is None:
        draft.note("recompute not stated: none assumed")
    elif granularity == "full":
        _full(draft)
    elif granularity == "selective":
        _selective(draft)
    elif granularity != "none":
        raise NotProjectable(f"recompute {granularity} is not mapped yet")


def _full(draft: Draft) -> None:
    recompute = draft.run["recompute"]
    method = recompute.get("method") or "uniform"
    layers = recompute.get("num_layers")
    if method not in ("uniform", "block"):
        draft.note(f"recompute '{method}' projected as every layer")
        method, layers = "uniform", 1
    if method == "block" and layers == 0:
        return
    draft.add(
        "--recompute-granularity", "full", "--recompute-method", method,
        "--recompute-num-layers", layers or 1,
    )  # fmt: skip


def _selective(draft: Draft) -> None:
    recompute = draft.run["recompute"]
    modules = recompute.get("modules") or []
    if torchtitan.write_selective(draft):
        return
    draft.add("--recompute-granularity", "selective")
    if modules:
        draft.add("--recompute-modules", *modules)
    elif "core attention" not in str(recompute.get("detail")):
        draft.note("what is recomputed is not stated: the core attention")
