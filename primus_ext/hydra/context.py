"""What the callback needs to know of the composed configuration, and how it leaves."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, cast

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from primus_ext.hydra import typed
from primus_ext.runner import Exit, Outcome, close

RESOLVER = "primus_ext.context"
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def register_resolver() -> None:
    """Let ``${primus_ext.context:}`` in our group files stand for :func:`of_root`'s answer.

    Hydra makes callbacks from their own node alone.  A resolver sees the root, so the callback can
    take over when it is made: before a hook of any other callback, which may start a tracker.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # OmegaConf 2.4 renames the function, 2.3 has no other
        OmegaConf.register_new_resolver(RESOLVER, _resolve, replace=True)


def _resolve(*, _root_: DictConfig) -> dict[str, Any]:
    # Where the user's output folder has no name, Hydra reports it, as it would without us.
    with guarded("reading the configuration", passes=OmegaConfBaseException):
        return of_root(_root_)
    raise AssertionError("unreachable")


def of_root(root: DictConfig) -> dict[str, Any]:
    """Read what a projection needs from the whole composed configuration.

    Args:
        root: The configuration with its ``hydra`` node.

    Returns:
        ``multirun``; ``directory``, Hydra's output folder; ``out``, ``fail_on``, ``cache``,
        ``schedule``, ``routing``, ``expert_skew`` and ``rank_cv`` as composed below ``projection``
        (the user's own key of that name, where ours were not typed).
    """
    mode = OmegaConf.select(root, "hydra.mode")
    multirun = getattr(mode, "name", mode) == "MULTIRUN"
    with _current(root):
        directory = OmegaConf.select(root, f"hydra.{'sweep' if multirun else 'run'}.dir")
    own = OmegaConf.select(root, "projection")
    node = own if isinstance(own, DictConfig) else {}
    return {
        "multirun": multirun,
        "directory": str(directory),
        "out": node.get("out"),
        "fail_on": node.get("fail_on"),
        "routing": node.get("routing"),
        "expert_skew": node.get("expert_skew"),
        "rank_cv": node.get("rank_cv"),
        "cache": node.get("cache"),
        "schedule": node.get("schedule"),
        "model": OmegaConf.select(root, "hydra.runtime.choices.model"),
        "chose_target": OmegaConf.select(root, "hydra.runtime.choices.target_cluster"),
    }


@contextlib.contextmanager
def _current(root: DictConfig) -> Iterator[None]:
    """Let ``${hydra:...}`` in the output folder's name resolve, as it will when Hydra makes it."""
    holder = HydraConfig.instance()
    previous = holder.cfg
    holder.cfg = cast(Any, root)  # declared as the dataclass that it is a copy of
    try:
        yield
    finally:
        holder.cfg = previous


@contextlib.contextmanager
def guarded(
    hook: str, passes: type[Exception] | tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Leave the process with code 4 on any error inside.

    Args:
        hook: What runs inside, for the message.
        passes: Errors that are let through.
    """
    try:
        yield
    except passes:
        raise
    except Exception as error:
        traceback.print_exc()
        leave(
            f"primus_ext itself failed in {hook}, nothing was projected or trained: {error!r}",
            exit_code=Exit.INTERNAL,
        )


def is_first_rank() -> bool:
    """Whether this is rank 0 of its job, or the only process."""
    ranks = (os.environ[name] for name in _RANK_VARIABLES if os.environ.get(name))
    return next(ranks, "0") == "0"


def leave_if_not_first() -> None:
    """End every rank but the first, at once and well.

    Any other code would make torchrun end rank 0 before it has written ``verdict.json``.

    Raises:
        SystemExit: with code 0, on every rank but the first.
    """
    if not is_first_rank():
        raise SystemExit(0)


def leave(message: str, *, exit_code: Exit = Exit.USAGE, directory: Path | None = None) -> NoReturn:
    """Say why nothing was run, write ``verdict.json`` where possible, and leave the process.

    Args:
        message: One sentence.
        exit_code: The code to leave with.
        directory: The output folder; by default the one that was typed, if any.
    """
    leave_if_not_first()
    if directory is None:
        with contextlib.suppress(Exception):  # what failed may be the reading itself
            out = typed.read(sys.argv[1:]).out
            directory = Path(out).absolute() if out and "${" not in out else None
    raise SystemExit(close(Outcome(exit_code=exit_code, message=message), directory))
