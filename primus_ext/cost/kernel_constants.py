"""Names and meaning of the constants in ``kernel_model`` of an accelerator file.

They belong to a generation of hardware and its libraries, not to a shape.
``scripts/fit/kernels.py`` fits them and every file says from how many rows and how well.
"""

from __future__ import annotations

from primus_ext.cluster import Accelerator
from primus_ext.cost.priced import CostError

MEANING = {
    "gemm_prologue_k": "columns of the contraction whose time filling and draining a tile costs",
    "gemm_wave_share": "share of the work that waits for whole waves of tiles; the rest is spread "
    "over the multiprocessors by splitting the contraction (split-K, stream-K)",
    "gemm_tile_loss": "edge, in elements, at which a tile of equal sides spends as long on loading "
    "its operands as on multiplying them",
    "gemm_overhead_s": "seconds of a matrix product that do nothing of its work",
    "gemm_layout_nn": "rate of an input gradient over that of a forward product",
    "gemm_layout_nt": "rate of a weight gradient over that of a forward product",
    "attention_keys_forward": "keys whose time each block of query rows costs besides its own: "
    "pipeline, epilogue, and what the mask throws away of the diagonal block",
    "attention_keys_backward": "the same of a backward",
    "attention_tail_forward": "blocks of 128 query rows against all keys that the device waits "
    "for at the end",
    "attention_tail_backward": "the same of a backward",
    "attention_gqa_backward": "rate of a backward whose query heads share key heads over one whose "
    "heads do not",
}
"""What each constant means."""


def constant(accelerator: Accelerator, name: str) -> float:
    """The value of one constant.

    Raises:
        CostError: The accelerator's file lacks it.
    """
    figure = accelerator.kernel_model.get(name)
    if figure is None:
        raise CostError(
            f"kernel_model.{name} of {accelerator.name} is missing: {MEANING[name]}; a file of the "
            "same generation has it"
        )
    return figure.value
