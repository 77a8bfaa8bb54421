"""Makes Transformer Engine impossible to import, as a "framework" of a request."""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any


class _Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if fullname.partition(".")[0] == "transformer_engine":
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


def install(_request: Any) -> None:
    sys.meta_path.insert(0, _Absent())
