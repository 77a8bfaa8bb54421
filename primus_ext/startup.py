"""What runs whenever Python starts where this package is installed (``primus_ext_startup.pth``).

Two things must be in place before the first line of the user's script, and only here can be.
Nothing heavy is imported: it costs every Python process of the environment.
"""

from __future__ import annotations

import sys

from primus_ext.emulate import te_guard

TYPE_CHECKING = False  # the name that type checkers know; importing typing would cost 8 ms
if TYPE_CHECKING:
    from typing import Any

_GROUP, _RERUN = "rerun", "--experimental-rerun"


def _reruns(word: str) -> bool:
    """Whether argparse takes the word for Hydra's option (no other one begins with ``--e``)."""
    option = word.partition("=")[0]
    return len(option) > len("--") and _RERUN.startswith(option)


def install() -> None:
    """Let Megatron be imported beside an empty Transformer Engine; let no rerun train by mistake.

    See :mod:`primus_ext.emulate.te_guard` and :mod:`primus_ext.hydra.rerun`.
    """
    te_guard.install()
    if any(_reruns(word) for word in sys.orig_argv[1:]):
        from primus_ext.emulate import registry

        registry.patch(
            "hydra.main", group=_GROUP, versions="hydra-core 1.3 and 1.4",
            reason="--experimental-rerun takes overrides that no plugin sees: it would train",
        )(_refuse)  # fmt: skip
        registry.apply_all(_GROUP)


def _refuse(module: Any) -> None:
    from primus_ext.hydra import rerun

    rerun.refuse(module)


install()
