"""How long matrix products keep the multiprocessors busy: tiles, waves, prologues."""

from __future__ import annotations

import math
from collections.abc import Sequence

from primus_ext.cluster import Accelerator
from primus_ext.cost.kernel_constants import constant

TILES = ((256, 256), (256, 128), (128, 256), (128, 128), (256, 64), (64, 256),
         (128, 64), (64, 128), (64, 64))  # fmt: skip
"""Output tiles [rows, columns] that the libraries choose from (NVIDIA, Matrix Multiplication
Background User's Guide, tile quantization; hipBLASLt macro tiles).  256x256 is two multiprocessors
working together on Blackwell, one workgroup on CDNA."""
LARGEST = 1 / 256 + 1 / 256

Part = tuple[int, int, int, int]
"""Equal products in one kernel: rows, columns, contraction, how many."""


def busy_flops(accelerator: Accelerator, parts: Sequence[Part]) -> float:
    """FLOPs the device could do at its best rate while it computes the products.

    The smallest over :data:`TILES`, as the libraries' heuristics look for it: every tile is
    computed whole, costs :data:`gemm_prologue_k` extra columns and, the smaller it is, more loading
    of operands; a share of the work waits for whole waves of tiles.

    Args:
        accelerator: Its generation's constants apply.
        parts: Products that run in one kernel (or on parallel streams), one or many.
    """
    units = accelerator.multi_processors
    prologue = constant(accelerator, "gemm_prologue_k")
    whole = constant(accelerator, "gemm_wave_share")
    loss = constant(accelerator, "gemm_tile_loss")
    best = math.inf
    for rows, columns in TILES:
        tiles, depth = 0, 0.0
        for m, n, k, count in parts:
            made = count * -(-m // rows) * -(-n // columns)
            tiles += made
            depth += made * (k + prologue)
        if not tiles:
            return 0.0
        waves = tiles / units
        stretch = 1 + whole * (math.ceil(waves) / waves - 1)
        loading = (1 + loss * (1 / rows + 1 / columns)) / (1 + loss * LARGEST)
        best = min(best, 2.0 * rows * columns * depth * stretch * loading)
    return best
