"""Plain JSON values back to the dataclasses of ``trace``, ``plan`` and ``result``."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from primus_ext.plan import Plan
from primus_ext.trace import RankTrace

Converter = Callable[[Any], Any]


class FormatError(ValueError):
    """A value does not have the shape of the dataclass it should become."""


def from_plain[T](kind: type[T], value: Any) -> T:
    """The object that :func:`primus_ext.trace.to_plain` made ``value`` of.

    Args:
        kind: A dataclass whose fields are scalars, enums, dataclasses, tuples or dictionaries.
        value: What ``json.loads`` returns.

    Raises:
        FormatError: ``value`` has other fields or other types.
    """
    return _converter(kind)(value)


def plan_from_plain(value: Any) -> Plan:
    """The plan that a child process wrote.

    Raises:
        FormatError: It has another shape.
    """
    return from_plain(Plan, value)


def traces_from_plain(values: Any) -> list[RankTrace]:
    """The traces that a child process wrote.

    Raises:
        FormatError: They have another shape.
    """
    if not isinstance(values, list):
        raise FormatError(f"{type(values).__name__} is not a list of traces")
    return [from_plain(RankTrace, value) for value in values]


@functools.cache
def _converter(kind: Any) -> Converter:
    """A function that checks and converts one type."""
    if kind is Any:
        return _frozen
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is tuple:
        return _tuple(arguments)
    if origin is dict:
        return _dict(*arguments)
    if origin in (typing.Union, types.UnionType):
        return _optional(arguments)
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return _enum(kind)
    if kind in (int, float, str, bool):
        return _scalar(kind)
    raise TypeError(f"{kind} is not supported")


def _frozen(value: Any) -> Any:
    """Attributes of unknown type: lists were tuples."""
    if isinstance(value, list):
        return tuple(_frozen(item) for item in value)
    return value


def _scalar(kind: type) -> Converter:
    def convert(value: Any) -> Any:
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is not kind:
            raise FormatError(f"{value!r} is not a {kind.__name__}")
        return value

    return convert


def _enum(kind: type[StrEnum]) -> Converter:
    def convert(value: Any) -> StrEnum:
        try:
            return kind(value)
        except ValueError as error:
            raise FormatError(f"{value!r} is not a {kind.__name__}") from error

    return convert


def _optional(arguments: tuple[Any, ...]) -> Converter:
    kinds = [a for a in arguments if a is not type(None)]
    if len(kinds) != 1 or len(arguments) != 2:
        raise TypeError(f"a union of {arguments} is not supported")
    convert = _converter(kinds[0])
    return lambda value: None if value is None else convert(value)


def _tuple(arguments: tuple[Any, ...]) -> Converter:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        if arguments[0] in (int, str):
            return _many_scalars(arguments[0])
        each = _converter(arguments[0])

        def convert(value: Any) -> tuple[Any, ...]:
            if not isinstance(value, list):
                raise FormatError(f"{value!r} is not a list")
            return tuple([each(item) for item in value])

        return convert
    items = [_converter(a) for a in arguments]

    def convert_fixed(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(items):
            raise FormatError(f"{value!r} is not a list of {len(items)}")
        return tuple([c(item) for c, item in zip(items, value, strict=True)])

    return convert_fixed


def _many_scalars(kind: type) -> Converter:
    """Tuples of one scalar type: most of a trace, and checked all at once."""
    only = {kind}

    def convert(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise FormatError(f"{value!r} is not a list")
        found = tuple(value)
        if set(map(type, found)) <= only:
            return found
        wrong = next(item for item in found if type(item) is not kind)
        raise FormatError(f"{wrong!r} is not a {kind.__name__}")

    return convert


def _dict(key: Any, item: Any) -> Converter:
    if key is not str:
        raise TypeError("keys of a dictionary must be strings")
    each = _converter(item)

    def convert(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise FormatError(f"{value!r} is not an object")
        return {name: each(one) for name, one in value.items()}

    return convert


def _dataclass(kind: Any) -> Converter:
    hints = typing.get_type_hints(kind)
    fields = {f.name: _converter(hints[f.name]) for f in dataclasses.fields(kind)}
    required = {
        f.name
        for f in dataclasses.fields(kind)
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    }

    def convert(value: Any) -> Any:
        if not isinstance(value, dict):
            raise FormatError(f"{value!r} is not a {kind.__name__}")
        wrong = (value.keys() - fields.keys()) | (required - value.keys())
        if wrong:
            raise FormatError(f"{kind.__name__} has missing or unknown fields: {sorted(wrong)}")
        return kind(**{name: fields[name](one) for name, one in value.items()})

    return convert
