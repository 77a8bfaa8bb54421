"""The module object that stands in for ``transformer_engine_torch``."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from primus_ext.emulate.te import names
from primus_ext.emulate.te.bindings import BINDINGS, unimplemented
from primus_ext.emulate.te.enums import ENUMS

MODULE_NAME = "transformer_engine_torch"

_FAMILIES = (
    "activations",
    "attention",
    "attention_backend",
    "bulk",
    "cast",
    "gemm",
    "grouped_gemm",
    "misc",
    "moe",
    "multi_tensor",
    "norms",
    "partial_cast",
    "recipe",
    "rope",
    "router",
    "softmax",
    "swizzle",
    "thd",
)


class FP8TensorMeta:
    """Scales and maxima of a module's FP8 tensors (delayed scaling)."""

    scale: Any
    scale_inv: Any
    amax_history: Any


def _refused(name: str) -> type:
    """A class that can be named in annotations and ``isinstance`` but not be built."""

    def __init__(self: Any, *_args: Any, **_kwargs: Any) -> None:
        raise NotImplementedError(
            f"transformer_engine_torch.{name} is not emulated (userbuffers communication overlap)"
        )

    return type(name, (), {"__init__": __init__, "__module__": MODULE_NAME})


def build() -> ModuleType:
    """A new module with every name of the real extension.

    Names without a body are functions that raise ``NotImplementedError`` with their name.
    """
    for family in _FAMILIES:
        importlib.import_module(f"primus_ext.emulate.te.{family}")
    unknown = set(BINDINGS) - set(names.FUNCTIONS)
    if unknown:
        raise RuntimeError(f"bodies for names that the extension does not have: {sorted(unknown)}")
    module = ModuleType(MODULE_NAME, "Stand-in of Transformer Engine's compiled extension.")
    for name, enumeration in ENUMS.items():
        setattr(module, name, enumeration)
    for name in names.FUNCTIONS:
        setattr(module, name, BINDINGS.get(name) or unimplemented(name))
    for name in names.CLASSES:
        setattr(module, name, _refused(name))
    setattr(module, "FP8TensorMeta", FP8TensorMeta)
    experimental = ModuleType(f"{MODULE_NAME}.grouped_mlp_experimental")
    for name in names.GROUPED_MLP:
        setattr(experimental, name, unimplemented(f"grouped_mlp_experimental.{name}"))
    setattr(module, "grouped_mlp_experimental", experimental)
    return module
