"""Which tokens of a command line are ours, and whether they make sense together.

This is read twice: by the search-path plugin before Hydra composes anything, and by the callback
to take our overrides out of the command that runs again.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import HydraException

from primus_ext.runner import MODES, target

GROUPS = ("projection", "target_cluster", "recipe")
"""Config groups that we put on Hydra's search path, each when it is asked for."""
CALLBACK = "hydra.callbacks.primus_projection"
OPTIONS = ("out", "fail_on", "cache", "routing", "expert_skew", "rank_cv", "schedule", "measured",
           "shrink", "collectives")  # fmt: skip
"""Keys that may be typed below ``projection``: ``+projection.out=DIR``."""

_MENTION = re.compile(rf"[+~].*|{re.escape(CALLBACK)}.*|hydra(\.callbacks)?=.*", re.DOTALL)
_MULTIRUN = re.compile(r"-m|--mu[a-z]*|\+{0,2}hydra\.mode=[\"']?MULTIRUN[\"']?")
_ALTERED = re.compile(rf"target_cluster\.({'|'.join(target.KEYS)})")
_GIVEN = (OverrideType.ADD, OverrideType.FORCE_ADD)


@dataclasses.dataclass(slots=True, kw_only=True)
class Typed:
    """Our part of a command line."""

    tokens: list[str] = dataclasses.field(default_factory=list)
    """Tokens that are ours, as typed; from the first one on nothing may train."""
    groups: set[str] = dataclasses.field(default_factory=set)
    """Those of :data:`GROUPS` that were selected with a ``+``."""
    options: set[str] = dataclasses.field(default_factory=set)
    """Those of :data:`OPTIONS` that were typed below ``projection``."""
    out: str | None = None
    """Value of ``+projection.out``."""
    problem: str | None = None
    """The first thing that makes no sense, as one sentence."""

    def object_to(self, problem: str) -> None:
        """Note a problem unless there is one already."""
        self.problem = self.problem or problem


def read(arguments: Iterable[str]) -> Typed:
    """Find our tokens in a program's arguments.

    Args:
        arguments: ``sys.argv[1:]``, or those of the command that is to run again.
    """
    typed, takes_away, alters = Typed(), [], []
    arguments = list(arguments)
    parser = OverridesParser.create()
    for token in arguments:
        if not _MENTION.fullmatch(token):
            continue
        try:
            override = parser.parse_override(token)
        except HydraException:
            continue  # Hydra refuses the whole command line for it
        if _removes(override):
            takes_away.append(token)
        elif _is_ours(override):
            typed.tokens.append(token)
            _take(typed, override, token)
        elif override.key_or_group == "recipe" and override.type in _GIVEN:
            typed.groups.add("recipe")
        elif _ALTERED.fullmatch(override.key_or_group) and override.type in _GIVEN:
            alters.append((override, token))
    if typed.tokens:
        _judge(typed, arguments, takes_away)
        for override, token in alters:
            _refuse_change(typed, override, token)
    return typed


def _refuse_change(typed: Typed, override: Override, token: str) -> None:
    """Object to a change of the target that lands beside it, in the program's own configuration.

    With ++ it may be meant for a key of the user's own, unless a target was chosen.
    """
    if override.type == OverrideType.ADD or "target_cluster" in typed.groups:
        key = override.key_or_group
        typed.object_to(
            f"{token} does not reach the target; legal: +target_cluster=NAME_AxB of another size, "
            f"or ++{CALLBACK}.{key}={token.partition('=')[2]} beside it"
        )


def _removes(override: Override) -> bool:
    """Whether the override takes the callback out of the configuration again."""
    key = override.key_or_group
    if override.type == OverrideType.DEL and key in ("projection", "target_cluster"):
        return True
    parents = ("hydra", "hydra.callbacks", CALLBACK)
    return key in parents and (override.type == OverrideType.DEL or override.value() is None)


def _is_ours(override: Override) -> bool:
    key = override.key_or_group
    if key.startswith(f"{CALLBACK}.") or key == CALLBACK:
        return True
    if override.type == OverrideType.ADD:
        return key == "target_cluster" or re.match(r"projection(?![^./])", key) is not None
    # ++ also changes what exists: only what can hardly be meant for the user's own key is ours.
    if override.type == OverrideType.FORCE_ADD:
        own = {f"projection.{option}" for option in OPTIONS} | {"target_cluster"}
        return key in own or (key == "projection" and override.value() in MODES)
    return False


def _take(typed: Typed, override: Override, token: str) -> None:
    key = override.key_or_group
    if key in ("projection", "target_cluster"):
        typed.groups.add(key)
        _check_choice(typed, override, token)
    elif key.startswith("projection"):
        option = key.removeprefix("projection.")
        if option not in OPTIONS:
            typed.object_to(
                f"{token} is not known; legal: "
                + ", ".join(f"+projection.{legal}=" for legal in OPTIONS)
                + f" (a key of your own `projection` is added with ++{key}=)"
            )
            return
        typed.options.add(option)
        value: Any = override.value()
        if override.is_sweep_override() or not isinstance(value, (str, int, float)) or value == "":
            typed.object_to(f"{token} needs one value, such as +projection.out=FOLDER")
        elif option == "out":
            typed.out = str(value)


def _check_choice(typed: Typed, override: Override, token: str) -> None:
    key = override.key_or_group
    legal = ("one of " + ", ".join(MODES)) if key == "projection" else "a name such as h100_8x8"
    if override.is_sweep_override() or not isinstance(override.value(), str):
        typed.object_to(f"{token} must select one option: {legal}")
    packages = (None, "_global_") if key == "projection" else (None,)
    if override.package not in packages:
        typed.object_to(f"{token} must be written +{key}=NAME, with NAME {legal}")


def _judge(typed: Typed, arguments: Sequence[str], takes_away: Sequence[str]) -> None:
    for token in takes_away:
        typed.object_to(f"{token} takes away again what {typed.tokens[0]} asks for; drop one")
    if "projection" not in typed.groups:
        typed.object_to(
            f"{typed.tokens[0]} needs a mode beside it, so nothing was run: add +projection=MODE "
            f"with MODE one of {', '.join(MODES)}"
        )
    for token in arguments:
        if _MULTIRUN.fullmatch(token):
            typed.object_to(
                f"{token} can't be combined with {typed.tokens[0]}: this version projects one job "
                "a command, so run it once for each configuration, without a sweep"
            )
