"""Arm the tripwire in every Python process that the user's program starts inside a projection.

This folder is on ``PYTHONPATH`` of the projection's child process only, so what that one starts
(``multiprocessing``, torchrun, ``python other.py``) runs this file before anything else.
"""

import importlib.machinery
import importlib.util
import os
import sys

_FOLDER = os.path.dirname(os.path.abspath(__file__))


def _arm() -> None:
    if os.environ.get("PRIMUS_EXT_CHILD"):
        from primus_ext.emulate import tripwire

        tripwire.arm()


def _run_the_one_that_this_hides() -> None:
    """An environment may have a ``sitecustomize`` of its own further down the path."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _FOLDER]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_arm()
_run_the_one_that_this_hides()
