"""``--experimental-rerun`` with ``+projection``: Hydra would ignore the second, and train.

Hydra reads a pickled configuration and calls the user's function; search path, plugins and
callbacks have no part in it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from primus_ext.hydra import context, typed


def refuse(module: Any) -> None:
    """Make ``hydra.main`` refuse a rerun in which a projection was asked for.

    Args:
        module: ``hydra.main``.
    """
    original: Callable[..., Any] = module._get_rerun_conf

    def read(file_path: str, overrides: list[str]) -> Any:
        _leave_if_ours(sys.argv[1:], "it ignores the command line")
        config = original(file_path, overrides)
        _leave_if_ours(_pickled_overrides(), f"{file_path} holds that override, but no callback")
        return config

    module._get_rerun_conf = read


def _pickled_overrides() -> list[str]:
    from hydra.core.hydra_config import HydraConfig

    asked: Any = HydraConfig.get().overrides
    return [*asked.task, *asked.hydra]


def _leave_if_ours(words: Iterable[str], why: str) -> None:
    tokens = typed.read(words).tokens
    if tokens:
        context.leave(
            f"--experimental-rerun can't be combined with {tokens[0]}: {why}, so it would train; "
            "give the overrides of that job on the command line instead"
        )
