"""Take a Python command line apart, so that it can be run again without our overrides."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from primus_ext.runner.outcome import UsageError

_LONG_OPTIONS_WITH_VALUE = ("--check-hash-based-pycs",)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """``python [options] (script | -m module) [arguments]``."""

    options: tuple[str, ...]
    """Options of the interpreter itself, e.g. ``-u`` or ``-X utf8``."""
    script: str | None
    module: str | None
    """Exactly one of ``script`` and ``module`` is set."""
    arguments: tuple[str, ...]


def split(argv: Sequence[str]) -> Command:
    """Take ``sys.orig_argv`` apart as CPython's own command line parser does.

    Args:
        argv: The interpreter, its options, the program and the program's arguments.

    Raises:
        UsageError: the program came from ``-c``, standard input or an interactive session, so
            there is nothing that a second process could run.
    """
    position = 1
    while position < len(argv):
        token = argv[position]
        if token == "-" or not token.startswith("-"):
            break
        flag, value, used = _option(argv, position)
        if flag in ("c", "m"):
            if flag == "c" or value is None:
                break
            return Command(
                options=tuple(argv[1:position]),
                script=None,
                module=value,
                arguments=tuple(argv[position + used :]),
            )
        position += used
    else:
        token = ""
    if not token or token.startswith("-"):
        raise UsageError(
            f"{' '.join(argv[: position + 1])!r} can't be run a second time: a projection starts "
            "your program again in a child process, so start it from a file or with -m"
        )
    return Command(
        options=tuple(argv[1:position]),
        script=token,
        module=None,
        arguments=tuple(argv[position + 1 :]),
    )


def _option(argv: Sequence[str], position: int) -> tuple[str, str | None, int]:
    """Letter, value and number of tokens of the interpreter option at ``position``.

    Letters may be bundled (``-um module``); of c, m, W and X the rest or the next token is the
    value.  A bundle before ``m`` is given up: nothing of it changes what is recorded.
    """
    token = argv[position]
    following = argv[position + 1] if position + 1 < len(argv) else None
    if token.startswith("--"):
        return token, None, 2 if token in _LONG_OPTIONS_WITH_VALUE else 1
    for index, letter in enumerate(token[1:], start=1):
        if letter in "cmWX":
            rest = token[index + 1 :]
            return (letter, rest, 1) if rest else (letter, following, 2)
    return token[-1], None, 1


def replaced(command: Command, removed: Sequence[str], added: Sequence[str]) -> Command:
    """Replace overrides in a program's arguments.

    Args:
        command: The program and its arguments.
        removed: Tokens to leave out wherever they stand.
        added: Tokens to put in.  They take the place of the first removed one: there, unlike at
            the end, the program is known to accept overrides.
    """
    unwanted = set(removed)
    arguments = command.arguments
    places = [index for index, token in enumerate(arguments) if token in unwanted]
    place = places[0] if places else len(arguments)
    before = [token for token in arguments[:place] if token not in unwanted]
    after = [token for token in arguments[place:] if token not in unwanted]
    return dataclasses.replace(command, arguments=(*before, *added, *after))
