"""What torchtitan runs otherwise than Megatron-LM: its loss, its selective checkpointing."""

from __future__ import annotations

from primus_ext.frameworks.published.draft import Draft

LOSS = "primus_ext.frameworks.megatron.torchtitan_loss"
BLOCKS = "primus_ext.frameworks.megatron.torchtitan_blocks"
EAGER_BLOCKS = "primus_ext.frameworks.megatron.torchtitan_eager_blocks"
# Releases that call torch's cross entropy without compiling it (train.py of both).
_EAGER_LOSS = ("9dec370", "2024")


def ran(draft: Draft) -> bool:
    """Whether torchtitan ran."""
    return draft.framework.startswith("torchtitan")


def write_loss(draft: Draft) -> None:
    """The loss, where it was not compiled; one that was is projected as Megatron-LM's fused one."""
    eager = draft.is_on("torch_compile") is not True or draft.framework.endswith(_EAGER_LOSS)
    if not ran(draft) or not eager:
        return
    if draft.run["parallelism"]["tp"] > 1:
        draft.note("the loss in FP32 over a sharded vocabulary as Megatron-LM's fused one")
        return
    draft.emulations.append(LOSS)
    draft.note("torchtitan's loss as it ran: torch's cross entropy in FP32")


def write_selective(draft: Draft) -> bool:
    """Selective checkpointing, of every second layer or by op; False where torchtitan did not run.

    For what a layer keeps by op, see :mod:`primus_ext.frameworks.megatron.torchtitan_blocks`.
    """
    if not ran(draft):
        return False
    layers = draft.run["model"]["num_layers"]
    if "per-layer" in str(draft.run["recompute"].get("detail")):
        draft.add(
            "--recompute-granularity", "full", "--recompute-method", "block",
            "--recompute-num-layers", layers // 2,
        )  # fmt: skip
        draft.note("recompute of every second layer projected as that of the first half")
        return True
    draft.add("--recompute-granularity", "selective", "--recompute-modules", "mlp")
    compiled = draft.is_on("torch_compile") is True
    draft.emulations.append(BLOCKS if compiled else EAGER_BLOCKS)
    draft.note("torchtitan's selective checkpointing projected as recompute of the MLP, "
               "with the bytes that it keeps beyond")  # fmt: skip
    return True
