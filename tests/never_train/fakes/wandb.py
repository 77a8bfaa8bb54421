"""Stands for an installed tracker: starting a run leaves a trace."""

from body import touch


def init(**_settings: object) -> None:
    touch("tracker")


def log(_values: dict) -> None:
    touch("tracker")
