"""What must not happen in a projection: a step of the user's training, or traces of one on disk.

:func:`arm` makes the process leave its path before an optimizer of the user's steps, a data loader
of theirs is read, a checkpoint is written or a job scheduler is asked to train elsewhere.  It
imports nothing of torch: whatever torch module is not loaded yet is guarded when it is (see
:mod:`primus_ext.emulate.registry`).
"""

from __future__ import annotations

import contextlib
import functools
import io
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, NoReturn

from primus_ext.emulate import schedulers, trackers
from primus_ext.emulate.registry import apply_all, patch

GROUP = "tripwire"
_TORCH = "torch 2.6 to 2.14"


class TrainingAttempted(BaseException):
    """The program went on to train; the message says what it tried.

    Not an ``Exception``: Hydra and training loops catch those and go on.
    """


def _raise(what: str) -> NoReturn:
    raise TrainingAttempted(
        f"the program went on to train ({what}) without reaching a training entry point that "
        "primus_ext knows (megatron.training.pretrain), so there is nothing to project"
    )


_trip: Callable[[str], NoReturn] = _raise
_allowed = 0


def arm(trip: Callable[[str], NoReturn] = _raise) -> None:
    """Guard this process from now on, and silence trackers; a second call only replaces ``trip``.

    Args:
        trip: Called with what was attempted ("an optimizer took a step"); must raise something
            that is not an ``Exception``.
    """
    global _trip
    _trip = trip
    apply_all(GROUP)
    trackers.silence()
    schedulers.watch(_check)


@contextlib.contextmanager
def allowed() -> Iterator[None]:
    """Inside, our own steps on a throw-away model pass."""
    global _allowed
    _allowed += 1
    try:
        yield
    finally:
        _allowed -= 1


def _check(what: str) -> None:
    if not _allowed:
        _trip(what)


def _guarded(function: Callable[..., Any], what: str) -> Callable[..., Any]:
    @functools.wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        _check(what)
        return function(*args, **kwargs)

    return guarded


@patch("torch.optim.optimizer", "register_optimizer_step_pre_hook", group=GROUP, versions=_TORCH,
       reason="torch's own hook before the step of any optimizer; nothing is replaced")
def _optimizer_step(module: ModuleType) -> None:
    module.register_optimizer_step_pre_hook(
        lambda *_arguments: _check("an optimizer was about to step")
    )


@patch("torch.utils.data.dataloader", "DataLoader.__iter__", group=GROUP, versions=_TORCH,
       reason="a projection reads no data set")
def _data_loader(module: ModuleType) -> None:
    loader = module.DataLoader
    loader.__iter__ = _guarded(loader.__iter__, "a DataLoader was about to be read")


@patch("torch.serialization", "save", group=GROUP, versions=_TORCH,
       reason="a projection writes no checkpoint")
def _save(module: ModuleType) -> None:
    original = module.save

    @functools.wraps(original)
    def save(obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(f, io.BytesIO):  # into memory: how modules copy their extra state
            _check("torch.save was about to write")
        original(obj, f, *args, **kwargs)

    _replace(module, "save", save, also="torch")


@patch("torch.distributed.checkpoint.state_dict_saver", "save", "async_save", group=GROUP,
       versions=_TORCH, reason="a projection writes no checkpoint")
def _distributed_save(module: ModuleType) -> None:
    for name in ("save", "async_save"):
        what = f"torch.distributed.checkpoint.{name} was about to write"
        guarded = _guarded(getattr(module, name), what)
        _replace(module, name, guarded, also="torch.distributed.checkpoint")


def _replace(module: ModuleType, name: str, value: object, also: str) -> None:
    """Set ``module.name``, and the copy that the package ``also`` took of it if it has one."""
    package = sys.modules.get(also)
    if package is not None and getattr(package, name, None) is getattr(module, name):
        setattr(package, name, value)
    setattr(module, name, value)
