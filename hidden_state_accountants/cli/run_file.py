"""Run descriptions: a TOML file, flags, or both, as an event."""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import attrs
import dp_accounting
from dp_accounting import NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.best_bound import RUN_EVENTS
from hidden_state_accountants.cli.names import LOSSES
from hidden_state_accountants.events.batch_order import (
    BatchOrder,
    batches_per_pass,
    parse_sampling_rate,
)
from hidden_state_accountants.events.loss_geometry import LossGeometry, LossKind
from hidden_state_accountants.events.plain_types import SCHEMA

_WHOLE = {
    *("num_steps", "num_epochs", "epochs", "batch_size", "dataset_size"),
    *("max_batch_size", "record_position"),
}


@attrs.frozen
class RunDescription:
    """A run and how to account for it.

    Attributes:
        event: The run.
        delta: The target delta.
        neighboring_relation: The relation.
        group_size: How many records one person has at most.
    """

    event: dp_accounting.DpEvent
    delta: float
    neighboring_relation: NeighboringRelation
    group_size: int = 1


def read(
    path: Path | None,
    flags: Mapping[str, Any],
    loss_flags: Mapping[str, Any],
    delta: float | None,
    relation: str | None,
    group_size: int | None,
    defaults: Mapping[str, Any],
) -> RunDescription:
    """The run in a file, with the values of the flags instead where given.

    Args:
        path: A TOML file, - for the standard input, or None: the flags describe the whole run.
        flags: Fields of the event; None where not given. "epochs" stands for num_steps.
        loss_flags: "loss" and the parameters of its class method.
        delta: Instead of the file's; 1e-5 if neither has one.
        relation: Instead of the file's; REPLACE_SPECIAL if neither has one.
        group_size: Instead of the file's; 1 if neither has one.
        defaults: Fields, or "epochs", that need not be given; those that the event does not have
            are left out.

    Raises:
        OSError: The file cannot be read.
        TypeError, ValueError: No run can have these values.
    """
    asked = [*flags.values(), *loss_flags.values(), delta, relation, group_size]
    with _named(path, has_flags=any(value is not None for value in asked)):
        values = {} if path is None else _toml(path)
        accounting = _table(values, "accounting")
        validate.unknown_keys(
            "[accounting]", accounting, ("delta", "neighboring_relation", "group_size")
        )
        kinds = {kind.__name__: kind for kind in RUN_EVENTS}
        name = values.setdefault("type", "LastIterateDpEvent")
        if name not in kinds:
            raise ValueError(
                f"Expected type to be one of {', '.join(kinds)}, got {name!r}."
                f"{validate.did_you_mean(name, kinds)}"
            )
        fields = {field.name: field for field in attrs.fields(kinds[name])}
        validate.unknown_keys("the run", values, [*fields, "type", "schema", "epochs"])
        values.setdefault("schema", SCHEMA)
        for key in _WHOLE & set(values):
            if isinstance(values[key], float) and values[key].is_integer():
                values[key] = int(values[key])  # TOML has no 1e7 among its integers
        given = {key: value for key, value in flags.items() if value is not None}
        if "epochs" in given or "num_steps" in given:
            values.pop("epochs", None)
            values.pop("num_steps", None)
        values.update(given)
        _merge_loss(values, {k: v for k, v in loss_flags.items() if v is not None})
        for key, value in defaults.items():
            lengths = ("epochs", "num_steps", "num_epochs")
            if key == "epochs" and not any(name in values for name in lengths):
                values[key] = value
            if key in fields:
                values.setdefault(key, value)
        _epochs_to_steps(values)
        missing = [
            key
            for key, field in fields.items()
            if field.default is attrs.NOTHING and key not in values
        ]
        if missing:
            raise ValueError(_missing(missing, path, is_typed=name != "LastIterateDpEvent"))
        if delta is None:
            delta = accounting.get("delta", 1e-5)
        if relation is None:
            relation = accounting.get("neighboring_relation", "replace_special")
        event = kinds[name].from_dict(values)
        relation = validate.neighboring_relation(relation)
        if group_size is None:
            group_size = accounting.get("group_size", 1)
        group_size = validate.integer("group_size", group_size, minimum=1)
        return RunDescription(event, validate.target_delta(delta), relation, group_size)


@contextlib.contextmanager
def _named(path: Path | None, *, has_flags: bool) -> Iterator[None]:
    """Errors about the run say which file it came from."""
    try:
        yield
    except (TypeError, ValueError) as error:
        if path is None:
            raise
        raise ValueError(f"{path}{' with these flags' if has_flags else ''}: {error}") from error


def _toml(path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
        return dict(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"not a TOML file: {error}") from None


def _table(values: dict[str, Any], name: str) -> dict[str, Any]:
    table = values.pop(name, {})
    if not isinstance(table, dict):
        raise ValueError(f"Expected [{name}] to be a table, got {table!r}.")
    return table


def _merge_loss(values: dict[str, Any], flags: dict[str, Any]) -> None:
    key = "block_loss" if values["type"] == "BlockCoordinateDpEvent" else "loss"
    table = values.pop(key, {})
    if not isinstance(table, dict):
        raise ValueError(f"Expected [{key}] to be a table with a kind, got {table!r}.")
    if "loss" in flags:
        table = {"kind": flags.pop("loss")}  # another loss: nothing of the file's is left
    kind = str(table.get("kind", "")).replace("-", "_")
    if kind == "none":
        if flags:
            raise ValueError(f"Expected no parameters of the loss 'none', got {_names(flags)}.")
        return
    table = {**table, **flags}
    table.pop("kind", None)
    if not kind:
        if table:
            raise ValueError(f"Expected a loss for {_names(table)}, got none. Add --loss convex.")
        return
    if kind not in LOSSES:
        raise ValueError(
            f"Expected loss to be one of none, {', '.join(LOSSES)}, got {kind!r}."
            f"{validate.did_you_mean(kind, LOSSES)}"
        )
    values[key] = _plain_loss(kind, table)


def _plain_loss(kind: str, table: dict[str, Any]) -> dict[str, Any]:
    """The constructor's arguments, from those of the class method or of the constructor."""
    fields = {field.name for field in attrs.fields(LossGeometry)}
    parameters = inspect.signature(getattr(LossGeometry, kind)).parameters
    is_full = kind in [k.value for k in LossKind] and not set(table) <= set(parameters)
    if is_full and set(table) <= fields and "weak_convexity" in table:
        return {"kind": kind, **table}
    unknown = sorted(set(table) - set(parameters))
    missing = [k for k, p in parameters.items() if p.default is p.empty and k not in table]
    if unknown or missing:
        needed = [k for k, p in parameters.items() if p.default is p.empty]
        others = [k for k in parameters if k not in needed]
        optional = f" (optional: {', '.join(others)})" if others else ""
        raise ValueError(
            f"Expected {' and '.join(needed)} for the loss {kind}"
            f"{optional}, got {', '.join(sorted(table)) or 'nothing'}."
            + "".join(validate.did_you_mean(key, parameters) for key in unknown)
        )
    loss = getattr(LossGeometry, kind)(**table)
    return {
        name: value.value if isinstance(value, LossKind) else value
        for name, value in attrs.asdict(loss).items()
        if value is not None
    }


def _epochs_to_steps(values: dict[str, Any]) -> None:
    if "epochs" not in values:
        return
    epochs = values.pop("epochs")
    if values["type"] == "BlockCoordinateDpEvent":
        values["num_epochs"] = epochs
        return
    if "num_steps" in values:
        raise ValueError("Expected one of epochs and num_steps, got both.")
    sizes = [values.get(name) for name in ("batch_size", "dataset_size")]
    rate = parse_sampling_rate(BatchOrder.POISSON, values.get("sampling_rate"))
    if not all(isinstance(n, int) and n > 0 for n in (*sizes, epochs)):
        raise ValueError(
            "Expected epochs, batch_size and dataset_size to be positive integers, got "
            f"{epochs!r}, {sizes[0]!r} and {sizes[1]!r}."
        )
    values["num_steps"] = epochs * batches_per_pass(sizes[0], sizes[1], rate)  # type: ignore[arg-type]


def _missing(names: list[str], path: Path | None, *, is_typed: bool) -> str:
    if path is not None:
        return f"There is no {', '.join(names)}."
    if is_typed:
        return f"Missing {', '.join(names)}."
    flags = _names(dict.fromkeys(names)).replace("--num-steps", "--epochs (or --num-steps)")
    return f"Missing {flags}. Or describe the run in a file: hsa init run.toml."


def _names(flags: Mapping[str, Any]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in flags)
