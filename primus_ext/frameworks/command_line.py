"""A command line for Megatron-LM from a dictionary of its argument names."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from primus_ext.frameworks.validation import ConfigError

_ARGUMENT = re.compile(r"argument ([^:]+): (.*)", re.DOTALL)


class _Parser(argparse.ArgumentParser):
    """A parser that raises what is wrong instead of printing its usage."""

    def error(self, message: str) -> NoReturn:
        raise argparse.ArgumentError(None, message)


def megatron_command_line(arguments: Mapping[str, Any], keys: Mapping[str, str]) -> list[str]:
    """Words that make Megatron-LM's parser set these arguments; None leaves its default.

    Args:
        arguments: Value by name (argparse destination).
        keys: User's key by name, for what is said about a bad value.

    Raises:
        ConfigError: If Megatron-LM has no such argument, or the value is not legal.
    """
    from megatron.training.arguments import add_megatron_arguments

    parser = add_megatron_arguments(_Parser(allow_abbrev=False))
    actions: dict[str, list[argparse.Action]] = {}
    for action in parser._actions:
        actions.setdefault(action.dest, []).append(action)
    words: list[str] = []
    for name, value in arguments.items():
        key = keys.get(name, f"megatron.{name}")
        if name not in actions:
            raise ConfigError(f"{key}={value} is not legal: Megatron-LM has no argument {name!r}")
        words += _words(key, value, actions[name])
    try:
        parser.parse_args(words)
    except argparse.ArgumentError as error:
        raise ConfigError(_complaint(str(error), arguments, keys, actions)) from error
    return words


def _words(key: str, value: Any, actions: list[argparse.Action]) -> list[str]:
    """The words that set one argument."""
    if value is None:
        return []
    flags = [action for action in actions if action.nargs == 0]
    if not flags:
        option = actions[0].option_strings[0]
        if isinstance(value, list):
            return [option, *map(str, value)]
        return [f"{option}={value}"]
    if not isinstance(value, bool):
        raise ConfigError(f"{key}={value} is not legal: it must be true or false")
    for action in flags:
        if isinstance(action, argparse.BooleanOptionalAction):
            return [action.option_strings[0 if value else -1]]
        if action.const is value:
            return [action.option_strings[0]]
    return []  # the only flag says the opposite, which is not the default


def _complaint(
    message: str,
    arguments: Mapping[str, Any],
    keys: Mapping[str, str],
    actions: Mapping[str, list[argparse.Action]],
) -> str:
    """What argparse says, with the user's key in the place of the option."""
    found = _ARGUMENT.match(message)
    if found is None:
        return f"the configuration is not legal for Megatron-LM: {message}"
    option = found[1].split("/")[0]
    name = next(n for n, group in actions.items() if option in group[0].option_strings)
    key = keys.get(name, f"megatron.{name}")
    return f"{key}={arguments[name]} is not legal for Megatron-LM: {found[2]}"
