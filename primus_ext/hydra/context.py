"""What the callback needs to know of the composed configuration, and how it leaves."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from primus_ext.runner import Exit, Outcome, close

RESOLVER = "primus_ext.context"
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def register_resolver() -> None:
    """Let ``${primus_ext.context:}`` in our group files stand for :func:`of_root`'s answer.

    Hydra makes callbacks from their own node alone.  A resolver sees the root, so the callback can
    take over when it is made: before a hook of any other callback, which may start a tracker.
    """
    OmegaConf.register_new_resolver(RESOLVER, of_root, replace=True)


def of_root(*, _root_: DictConfig) -> dict[str, Any]:
    """Read what a projection needs from the whole composed configuration.

    Args:
        _root_: The configuration with its ``hydra`` node.

    Returns:
        ``multirun``; ``directory``, Hydra's output folder; ``out`` and ``fail_on`` as composed
        below ``projection`` (the user's own key of that name, where ours were not typed).
    """
    mode = OmegaConf.select(_root_, "hydra.mode")
    multirun = getattr(mode, "name", mode) == "MULTIRUN"
    with _current(_root_):
        directory = OmegaConf.select(_root_, f"hydra.{'sweep' if multirun else 'run'}.dir")
    own = OmegaConf.select(_root_, "projection")
    typed = own if isinstance(own, DictConfig) else {}
    return {
        "multirun": multirun,
        "directory": str(directory),
        "out": typed.get("out"),
        "fail_on": typed.get("fail_on"),
        "chose_target": OmegaConf.select(_root_, "hydra.runtime.choices.target_cluster"),
    }


@contextlib.contextmanager
def _current(root: DictConfig) -> Iterator[None]:
    """Let ``${hydra:...}`` in the output folder's name resolve, as it will when Hydra makes it."""
    holder = HydraConfig.instance()
    previous = holder.cfg
    holder.cfg = root
    try:
        yield
    finally:
        holder.cfg = previous


@contextlib.contextmanager
def guarded(hook: str, typed_out: str | None) -> Iterator[None]:
    """Leave the process with code 4 on any error inside.

    Args:
        hook: What runs inside, for the message.
        typed_out: ``+projection.out`` as typed, for ``verdict.json``.
    """
    try:
        yield
    except Exception as error:
        traceback.print_exc()
        leave(
            f"primus_ext itself failed in {hook}, nothing was projected or trained: {error!r}",
            exit_code=Exit.INTERNAL,
            typed_out=typed_out,
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


def leave(
    message: str,
    *,
    exit_code: Exit = Exit.USAGE,
    typed_out: str | None = None,
    directory: Path | None = None,
) -> NoReturn:
    """Say why nothing was run, write ``verdict.json`` where possible, and leave the process.

    Args:
        message: One sentence.
        exit_code: The code to leave with.
        typed_out: ``+projection.out`` before composition; one with an interpolation is not used.
        directory: The output folder, where it is known.
    """
    leave_if_not_first()
    if directory is None and typed_out and "${" not in typed_out:
        directory = Path(typed_out).absolute()
    raise SystemExit(close(Outcome(exit_code=exit_code, message=message), directory))
