"""Before Hydra composes: our groups onto its search path, and a first look at the command line."""

from __future__ import annotations

import os
from pathlib import Path

from hydra.core.config_search_path import ConfigSearchPath

from primus_ext.conf_dir import ConfDirMissingError, hydra_conf_dir
from primus_ext.hydra import context, typed
from primus_ext.runner import Place, UsageError, arm_tripwire, place

PROVIDER = "primus_ext"


def prepare(search_path: ConfigSearchPath, arguments: list[str]) -> None:
    """Make what the command line asks for visible, or leave the process.

    A group is visible only where it is asked for with a ``+``: an app that has a key named
    ``projection`` or ``recipe`` of its own would otherwise find ``recipe=x`` taken for a choice in
    our group.  Each group lies in a folder of its own for that reason.

    Args:
        search_path: Hydra's search path, changed in place.
        arguments: ``sys.argv[1:]``.

    Raises:
        SystemExit: the command line makes no sense (2), we failed (4), or another rank
            does the work (0).
    """
    completing = any(word in ("-sc", "--shell-completion") for word in arguments)
    with context.guarded("the search-path plugin"):
        asked = typed.read(os.environ.get("COMP_LINE", "").split() if completing else arguments)
        if asked.tokens or place() is Place.DESCENDANT:
            arm_tripwire()
            context.register_resolver()
        if asked.problem and not completing:
            context.leave(asked.problem)
        try:
            for group in sorted(asked.groups):
                _add(search_path, group)
        except UsageError as error:
            context.leave(str(error))


def _add(search_path: ConfigSearchPath, group: str) -> None:
    """Put one group onto the search path.

    ``projection`` goes first, so that ``+projection=on`` is ours even where the user's own group of
    that name has such an option (it would train); the others go last, so that the user's win.
    """
    url = f"file://{_root_of(group)}"
    if group == "projection":
        search_path.prepend(PROVIDER, url)
    else:
        search_path.append(PROVIDER, url)


def _root_of(group: str) -> Path:
    """Folder that holds the one group ``group`` and nothing else."""
    try:
        root = hydra_conf_dir() / group
    except ConfDirMissingError as error:
        raise UsageError(str(error)) from error
    if not any((root / group).glob("*.yaml")):
        raise UsageError(
            f"primus_ext is installed without its configuration: {root / group} holds no files; "
            "install it again"
        )
    return root
