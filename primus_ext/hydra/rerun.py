"""``--experimental-rerun`` with ``+projection``: Hydra would ignore the second, and train.

Hydra 1.3 reads a pickled configuration and calls the user's function: search path, plugins and
callbacks have no part in it, and neither has the command line.  Hydra 1.4 composes anew, but no
plugin is told of the overrides that it reads from the earlier job's folder.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from primus_ext.hydra import context, typed


def refuse(module: Any) -> None:
    """Make ``hydra.main`` refuse a rerun in which a projection was asked for.

    Args:
        module: ``hydra.main``, just imported.
    """
    if hasattr(module, "_get_rerun_conf"):  # 1.3
        _refuse_pickled(module)
        return
    from hydra._internal import utils

    if hasattr(utils, "_get_rerun_overrides"):  # 1.4
        _refuse_saved(utils)
    else:
        _leave_if_ours(sys.argv[1:], "nobody knows what this release of Hydra does with both")


def _refuse_pickled(module: Any) -> None:
    original = module._get_rerun_conf

    def read(file_path: str, overrides: list[str]) -> Any:
        from hydra.core.hydra_config import HydraConfig

        _leave_if_ours(sys.argv[1:], "it ignores the command line")
        config = original(file_path, overrides)
        held: Any = HydraConfig.get().overrides
        _leave_if_ours(
            [*held.task, *held.hydra], f"{file_path} holds that override, and no callback is called"
        )
        return config

    module._get_rerun_conf = read


def _refuse_saved(utils: Any) -> None:
    original = utils._get_rerun_overrides

    def read(job_dir: str) -> Any:
        name, overrides = original(job_dir)
        _leave_if_ours(overrides, f"{job_dir} holds that override, which no plugin is told of")
        return name, overrides

    utils._get_rerun_overrides = read


def _leave_if_ours(words: Iterable[str], why: str) -> None:
    tokens = typed.read(words).tokens
    if tokens:
        context.leave(
            f"--experimental-rerun can't be combined with {tokens[0]}: {why}, so it would train; "
            "give the overrides of that job on the command line instead"
        )
