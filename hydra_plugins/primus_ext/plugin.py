"""The search-path plugin, which every Hydra app on the machine imports: nothing heavy here.

It looks at the command line and, where that asks for nothing of ours, does nothing at all.
Nothing here may raise an ``ImportError``: Hydra would drop the plugin with a warning, take
``+projection=on`` for a new key of the user's configuration, and train.
"""

from __future__ import annotations

import os
import re
import sys
import traceback

from hydra.core.config_search_path import ConfigSearchPath
from hydra.plugins.search_path_plugin import SearchPathPlugin

_OURS = re.compile(
    r"[+~]+(projection|target_cluster|recipe)([=@./]|$)|[+~]*hydra\.callbacks\.primus_projection\b"
)
_CHILD_MARK = "PRIMUS_EXT_CHILD"


class PrimusExtSearchPath(SearchPathPlugin):
    """Makes ``+projection``, ``+target_cluster`` and ``+recipe`` known where they are typed."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add our config groups, or leave the process where a projection could not start.

        Args:
            search_path: Hydra's search path.

        Raises:
            SystemExit: the command line asks for a projection and it can't be started: 2 for a
                broken installation or usage, 4 for an error of ours.
        """
        if not _concerned():
            return
        try:
            from primus_ext.hydra.search_path import prepare
        except Exception as error:
            sys.stderr.write(
                f"primus_ext: its Hydra plugin is installed but the package can't be imported "
                f"({type(error).__name__}: {error}), so nothing was run: install it again\n"
            )
            raise SystemExit(2) from None
        try:
            prepare(search_path, sys.argv[1:])
        except Exception as error:
            traceback.print_exc()
            sys.stderr.write(f"primus_ext: it failed itself before anything was run: {error!r}\n")
            raise SystemExit(4) from None


def _concerned() -> bool:
    words = [*sys.argv[1:], *os.environ.get("COMP_LINE", "").split()]
    return _CHILD_MARK in os.environ or any(_OURS.match(word) for word in words)
