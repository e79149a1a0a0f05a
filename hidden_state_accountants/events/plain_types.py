"""Events as plain JSON and TOML types and as one line of text."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import attrs
import dp_accounting

from hidden_state_accountants import validate

SCHEMA = 1
"""Version of the dictionary form."""

_AnyEvent = TypeVar("_AnyEvent", bound="PlainEvent")


class PlainEvent(dp_accounting.DpEvent):
    """An event whose fields can be written as plain types; a base of attrs classes.

    Attributes:
        tables: The fields that may be tables of their own, and the classes of these.
    """

    tables: ClassVar[Mapping[str, type]] = {}

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON and TOML types with a schema number; defaults are left out.

        None is written "none" where there is no default: TOML has no null, and a missing key must
        not change the mechanism.
        """
        result: dict[str, Any] = {"schema": SCHEMA, "type": type(self).__name__}
        for field in attrs.fields(type(self)):
            value = getattr(self, field.name)
            if field.default is attrs.NOTHING or value != field.default:
                result[field.name] = "none" if value is None else plain(value)
        return result

    @classmethod
    def from_dict(cls: type[_AnyEvent], dictionary: Mapping[str, Any]) -> _AnyEvent:
        """Inverse of `to_dict`.

        Raises:
            TypeError: It is not a dictionary.
            ValueError: The schema or type differs, or a key is unknown or missing.
        """
        if not isinstance(dictionary, Mapping):
            raise TypeError(f"Expected a dictionary, got {type(dictionary).__name__}.")
        arguments = dict(dictionary)
        for key, expected in (("schema", SCHEMA), ("type", cls.__name__)):
            found = arguments.pop(key, None)
            if found != expected:
                raise ValueError(f"Expected {key} = {expected!r}, got {found!r}.")
        for name, table in cls.tables.items():
            if isinstance(arguments.get(name), Mapping):
                arguments[name] = _construct(table, name, arguments[name])
        for field in attrs.fields(cls):
            if field.default is attrs.NOTHING and arguments.get(field.name) == "none":
                arguments[field.name] = None
        event: _AnyEvent = _construct(cls, cls.__name__, arguments)
        return event

    def __repr__(self) -> str:
        """The constructor call without defaults; long sequences are abbreviated."""
        arguments = []
        for field in attrs.fields(type(self)):
            value = getattr(self, field.name)
            if field.default is not attrs.NOTHING and value == field.default:
                continue
            text = str(value) if isinstance(value, enum.Enum) else repr(value)
            if isinstance(value, tuple) and len(value) > 6:
                text = f"({value[0]}, {value[1]}, ..., {value[-1]}; {len(value)} steps)"
            arguments.append(f"{field.name}={text}")
        return f"{type(self).__name__}({', '.join(arguments)})"


def plain(value: Any) -> Any:
    """Returns an event, of this package or of dp-accounting, or a part of one as plain types."""
    if isinstance(value, PlainEvent):
        return value.to_dict()
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [plain(part) for part in value]
    if attrs.has(type(value)):
        kind = {"type": type(value).__name__} if isinstance(value, dp_accounting.DpEvent) else {}
        parts = ((field.name, getattr(value, field.name)) for field in attrs.fields(type(value)))
        return kind | {name: plain(part) for name, part in parts if part is not None}
    return value


def _construct(cls: Any, name: str, arguments: Any) -> Any:
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
