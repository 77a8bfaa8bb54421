"""Stand-ins of the packages ``mamba_ssm`` and ``causal_conv1d``, whose kernels need a GPU.

They are importable under those names while a program is emulated, whether or not the real ones
are installed (which fail to import without a driver).  What they replace is named here; their
releases are those whose allocations they follow.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

VERSIONS = {"mamba_ssm": "2.3.2", "causal_conv1d": "1.6.1"}


class _OnFirstUse(ModuleType):
    """A module whose names come from our own on first use, so that nothing loads before."""

    def __init__(self, name: str, names: dict[str, str]) -> None:
        super().__init__(name, f"Stand-in of {name}.")
        self.__path__ = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        self._names = names

    def __getattr__(self, name: str) -> Any:
        if name not in self._names:
            raise AttributeError(f"the stand-in of {self.__name__} has no {name}")
        module = importlib.import_module(f"primus_ext.emulate.mamba.{self._names[name]}")
        return getattr(module, name)


_MODULES: dict[str, dict[str, str]] = {
    "mamba_ssm": {},
    "mamba_ssm.ops": {},
    "mamba_ssm.ops.triton": {},
    "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": "norm"},
    "mamba_ssm.ops.triton.ssd_combined": {
        "mamba_chunk_scan_combined": "combined",
        "mamba_split_conv1d_scan_combined": "combined",
    },
    "causal_conv1d": {"causal_conv1d_fn": "conv", "causal_conv1d_update": "inference"},
    "causal_conv1d.causal_conv1d_varlen": {"causal_conv1d_varlen_states": "inference"},
}


def install() -> None:
    """Make the stand-ins importable.  Idempotent."""
    for name, names in _MODULES.items():
        if not isinstance(sys.modules.get(name), _OnFirstUse):
            module: Any = _OnFirstUse(name, names)
            package = name.partition(".")[0]
            if name == package:
                module.__version__ = VERSIONS[package]
            sys.modules[name] = module
            parent, _, last = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], last, module)
