"""Conversion between the extension's ``DType`` and torch's dtypes."""

from __future__ import annotations

from typing import Any

import torch

_TORCH = {
    0: torch.uint8,
    2: torch.int32,
    4: torch.float32,
    5: torch.float16,
    6: torch.bfloat16,
    7: torch.float8_e4m3fn,
    8: torch.float8_e5m2,
}


def torch_dtype(dtype: Any) -> torch.dtype:
    """The torch dtype of a ``DType`` (of the stand-in or of Transformer Engine's Python mirror).

    A ``torch.dtype`` passes through: parts of Transformer Engine hand one over.
    """
    return dtype if isinstance(dtype, torch.dtype) else _TORCH[int(dtype)]
