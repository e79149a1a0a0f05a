"""Events as plain JSON and TOML types and as one line of text."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

import attrs

from hidden_state_accountants import validate

SCHEMA = 1
"""Version of the dictionary form."""


def to_dict(event: Any, explicit: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of an attrs event with a schema number; defaults and None are left out.

    Args:
        event: The event.
        explicit: What to write beside, for fields whose None has a meaning.
    """
    result: dict[str, Any] = {"schema": SCHEMA, "type": type(event).__name__, **explicit}
    for field in attrs.fields(type(event)):
        value = getattr(event, field.name)
        if value is None or (field.default is not attrs.NOTHING and value == field.default):
            continue
        result[field.name] = _plain(value)
    return result


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    if attrs.has(type(value)):
        return {
            field.name: _plain(part)
            for field in attrs.fields(type(value))
            if (part := getattr(value, field.name)) is not None
        }
    return value


def arguments_of(cls: type, dictionary: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments in the dictionary form of an event of type `cls`.

    Raises:
        TypeError: It is not a dictionary.
        ValueError: The schema or type differs.
    """
    if not isinstance(dictionary, Mapping):
        raise TypeError(f"Expected a dictionary, got {type(dictionary).__name__}.")
    arguments = dict(dictionary)
    for key, expected in (("schema", SCHEMA), ("type", cls.__name__)):
        found = arguments.pop(key, None)
        if found != expected:
            raise ValueError(f"Expected {key} = {expected!r}, got {found!r}.")
    return arguments


def construct(cls: Any, name: str, arguments: Any) -> Any:
    """An instance of the attrs class, with errors that name unknown and missing keys."""
    if not isinstance(arguments, Mapping):
        raise TypeError(f"Expected {name} to be a dictionary, got {arguments!r}.")
    fields = {field.name: field for field in attrs.fields(cls)}
    validate.unknown_keys(name, arguments, fields)
    missing = [
        key
        for key, field in fields.items()
        if field.default is attrs.NOTHING and key not in arguments
    ]
    if missing:
        raise ValueError(f"Missing key in {name}: {', '.join(missing)}.")
    return cls(**arguments)


def one_line_repr(event: Any) -> str:
    """The constructor call without defaults; long sequences are abbreviated."""
    arguments = []
    for field in attrs.fields(type(event)):
        value = getattr(event, field.name)
        if field.default is not attrs.NOTHING and value == field.default:
            continue
        text = str(value) if isinstance(value, enum.Enum) else repr(value)
        if isinstance(value, tuple) and len(value) > 6:
            text = f"({value[0]}, {value[1]}, ..., {value[-1]}; {len(value)} steps)"
        arguments.append(f"{field.name}={text}")
    return f"{type(event).__name__}({', '.join(arguments)})"
