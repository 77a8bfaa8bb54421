"""The Hydra callback behind ``+projection=MODE``: it takes over instead of letting the job run."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from hydra.experimental.callback import Callback
from omegaconf import OmegaConf

from primus_ext.hydra import context, typed
from primus_ext.runner import Place, Request, UsageError, command, place, run

_PINNED = ("hydra.run.dir", "hydra.output_subdir")


class ProjectionCallback(Callback):
    """Projects the job and leaves the process when it is made.

    Hydra makes callbacks before it calls a hook of any of them, makes a folder or configures
    logging, so nothing of the user's has begun.  Hydra swallows an ``Exception`` in a hook and
    goes on to train: every way in is guarded, and every hook that would mean that the job goes on
    leaves too.

    In the child process of a projection the callback does nothing: the program must run there.
    """

    def __init__(self, **settings: Any) -> None:
        """Take over.

        Args:
            settings: ``mode``, ``context`` and optionally those of :data:`typed.OPTIONS` (as the
                files of the ``projection`` group have them) and ``target_cluster`` (content of such
                a file).

        Raises:
            SystemExit: always, but in the child process of a projection.
        """
        self._inside = False
        with context.guarded("ProjectionCallback"):
            self._inside = place() is Place.CHILD
            if not self._inside:
                _take_over(settings)

    def on_run_start(self, config: Any, **kwargs: Any) -> None:
        """Never reached but in the child."""
        self._stop("on_run_start")

    def on_multirun_start(self, config: Any, **kwargs: Any) -> None:
        """Never reached but in the child."""
        self._stop("on_multirun_start")

    def on_job_start(self, config: Any, **kwargs: Any) -> None:
        """Never reached but in the child."""
        self._stop("on_job_start")

    def _stop(self, hook: str) -> None:
        with context.guarded(hook):
            if not self._inside:
                raise RuntimeError("the projection did not take over when Hydra made the callback")


def _take_over(settings: Mapping[str, Any]) -> NoReturn:
    context.leave_if_not_first()
    plain = {key: _plain(value) for key, value in settings.items()}
    surroundings = plain.get("context") or {}
    asked = typed.read(sys.argv[1:])
    given = {key: surroundings.get(key) for key in asked.options}
    out = given.get("out") or plain.get("out")
    directory = Path(str(out) if out else Path(surroundings["directory"], "projection")).absolute()
    try:
        _check(plain, surroundings)
        request = _request(plain, given, directory, str(surroundings.get("model") or ""))
    except UsageError as error:
        context.leave(str(error), directory=directory)
    raise SystemExit(run(request))


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _path(value: Any) -> str | None:
    return None if value is None else str(Path(str(value)).absolute())


def _text(value: Any) -> str | None:
    """As typed: ``zbv`` and the like; None where nothing was said."""
    return None if value is None else str(value)


def _whole(key: str, value: Any) -> int | None:
    """A whole number of at least 1, or None where nothing was said."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise UsageError(f"+projection.{key}={value} is not legal: it must be a whole number above 0")


def _check(settings: Mapping[str, Any], surroundings: Mapping[str, Any]) -> None:
    legal = ("mode", *typed.OPTIONS, "target_cluster", "context")
    unknown = sorted(set(settings) - set(legal))
    if unknown:
        raise UsageError(
            f"{typed.CALLBACK}.{unknown[0]} is not known; legal: {', '.join(legal[:-1])}"
        )
    if place() is Place.DESCENDANT:
        raise UsageError(
            "the program started itself again inside a projection; only its first process is "
            "projected"
        )
    if surroundings["multirun"]:
        raise UsageError(
            "hydra.mode=MULTIRUN can't be combined with +projection: this version projects one "
            "job a command, so run it once for each configuration, without a sweep"
        )
    if settings.get("target_cluster") is None and surroundings["chose_target"]:
        raise UsageError(
            f"+target_cluster={surroundings['chose_target']} sets nothing that is known here: the "
            f"file must begin with the line `# @package {typed.CALLBACK}.target_cluster`"
        )


def _switch(value: Any) -> str:
    """``on`` or ``off`` as typed, or as YAML reads them; on where nothing was said."""
    return {None: "on", True: "on", False: "off"}.get(value, str(value))


def _request(
    settings: Mapping[str, Any], given: Mapping[str, Any], directory: Path, model: str
) -> Request:
    original = command.split(sys.orig_argv)
    ours = typed.read(original.arguments).tokens
    pinned = [
        token
        for token in original.arguments
        if token.lstrip("+").startswith(tuple(f"{key}=" for key in _PINNED))
    ]
    scratch = tempfile.mkdtemp(prefix="primus_ext_")
    added = [f'hydra.run.dir="{scratch}/run"', "hydra.output_subdir=null"]
    return Request(
        mode=str(settings.get("mode")),
        command=command.replaced(original, [*ours, *pinned], added),
        cwd=os.getcwd(),
        out=directory,
        scratch=Path(scratch),
        target_cluster=settings.get("target_cluster"),
        fail_on=given.get("fail_on") or settings.get("fail_on"),
        cache=_switch(given.get("cache", settings.get("cache"))),
        routing=_path(given.get("routing") or settings.get("routing")),
        measured=_path(given.get("measured") or settings.get("measured")),
        shrink=_whole("shrink", given.get("shrink", settings.get("shrink"))),
        expert_skew=_text(given.get("expert_skew", settings.get("expert_skew"))),
        rank_cv=_text(given.get("rank_cv", settings.get("rank_cv"))),
        schedule=_text(given.get("schedule", settings.get("schedule"))),
        collectives=_path(given.get("collectives") or settings.get("collectives")),
        removed=tuple(ours),
        name=model,
        environment=dict(os.environ),
    )
