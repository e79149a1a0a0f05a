"""Run descriptions: a TOML file, flags, or both, as an event."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import dp_accounting
from dp_accounting import NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.best_bound import RUN_EVENTS
from hidden_state_accountants.events.batch_order import (
    BatchOrder,
    batches_per_pass,
    parse_sampling_rate,
)
from hidden_state_accountants.events.loss_geometry import LossGeometry, LossKind
from hidden_state_accountants.events.plain_types import SCHEMA

_LOSSES = [n for n, _ in inspect.getmembers(LossGeometry, inspect.ismethod) if n[0] != "_"]


@attrs.frozen
class RunDescription:
    """A run and how to account for it.

    Attributes:
        event: The run.
        delta: The target delta.
        neighboring_relation: The relation.
    """

    event: dp_accounting.DpEvent
    delta: float = attrs.field(converter=validate.target_delta)
    neighboring_relation: NeighboringRelation = attrs.field(converter=validate.neighboring_relation)


def read(
    path: Path | None,
    *,
    run: Mapping[str, Any],
    loss: Mapping[str, Any],
    accounting: Mapping[str, Any],
    defaults: Mapping[str, Any],
) -> RunDescription:
    """The run in a file, with the values of the flags instead where given.

    Args:
        path: A TOML file, - for the standard input, or None: the flags describe the whole run.
        run: Flags that are fields of the event; "epochs" stands for num_steps.
        loss: The flag "loss" and the parameters of its class method.
        accounting: Flags for the target delta, and the relation.
        defaults: Fields, or "epochs", that need not be given; those that the event does not have
            are left out.

    Raises:
        OSError: The file cannot be read.
        TypeError, ValueError: No run can have these values; the text names the file.
    """
    try:
        values = {} if path is None else _toml(path)
        table = values.pop("accounting", {})
        if not isinstance(table, dict):
            raise ValueError(f"Expected [accounting] to be a table, got {table!r}.")
        known = {"delta": 1e-5, "neighboring_relation": "replace_special"}
        validate.unknown_keys("[accounting]", table, known)
        flags = {"neighboring_relation" if k == "relation" else k: v for k, v in accounting.items()}
        event = _event(path, values, run, dict(loss), defaults)
        return RunDescription(event, **(known | table | flags))
    except (TypeError, ValueError) as error:
        if path is None:
            raise
        flags_too = " with these flags" if run or loss or accounting else ""
        raise ValueError(f"{path}{flags_too}: {error}") from error


def _event(
    path: Path | None,
    values: dict[str, Any],
    flags: Mapping[str, Any],
    loss_flags: dict[str, Any],
    defaults: Mapping[str, Any],
) -> dp_accounting.DpEvent:
    kinds = {kind.__name__: kind for kind in RUN_EVENTS}
    name = values.setdefault("type", "LastIterateDpEvent")
    if name not in kinds:
        raise ValueError(
            f"Expected type to be one of {', '.join(kinds)}, got {name!r}."
            f"{validate.did_you_mean(name, kinds)}"
        )
    fields = {field.name: field for field in attrs.fields(kinds[name])}
    values.setdefault("schema", SCHEMA)
    whole = {key for key, field in fields.items() if str(field.type).startswith("int")}
    for key in {*whole, "epochs"} & set(values):
        if isinstance(values[key], float) and values[key].is_integer():
            values[key] = int(values[key])  # TOML has no 1e7 among its integers
    if "epochs" in flags or "num_steps" in flags:
        values.pop("epochs", None)
        values.pop("num_steps", None)
    values |= flags
    _merge_loss(values, loss_flags)
    lengths = {"epochs", "num_steps", "num_epochs"} & set(values)
    for key, value in defaults.items():
        if key in fields or (key == "epochs" and not lengths):
            values.setdefault(key, value)
    _epochs_to_steps(values)
    missing = [k for k, f in fields.items() if f.default is attrs.NOTHING and k not in values]
    if missing and path is None:
        names = _names(missing).replace("--num-steps", "--epochs (or --num-steps)")
        raise ValueError(f"Missing {names}. Or describe the run in a file: hsa init run.toml.")
    return kinds[name].from_dict(values)


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


def _merge_loss(values: dict[str, Any], flags: dict[str, Any]) -> None:
    """Puts a `LossGeometry` into the values, from their table and the flags."""
    key = "block_loss" if values["type"] == "BlockCoordinateDpEvent" else "loss"
    if "loss_clip_norm" in flags:  # --clip-norm is that of the run
        flags["clip_norm"] = flags.pop("loss_clip_norm")
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
    table = {name: value for name, value in (table | flags).items() if name != "kind"}
    if not kind and not table:
        return
    if not kind:
        raise ValueError(f"Expected a loss for {_names(table)}, got none. Add --loss convex.")
    if kind not in _LOSSES:
        raise ValueError(
            f"Expected loss to be one of none, {', '.join(_LOSSES)}, got {kind!r}."
            f"{validate.did_you_mean(kind, _LOSSES)}"
        )
    needed, others = _parameters(kind)
    if kind in {k.value for k in LossKind} and {"weak_convexity", *needed} < set(table):
        values[key] = {"kind": kind, **table}  # as in the dictionary form of an event
        return
    unknown = sorted(set(table) - {*needed, *others})
    if unknown or not set(needed) <= set(table):
        raise ValueError(
            f"Expected {loss_arguments(kind)} for the loss {kind}, got "
            f"{', '.join(sorted(table)) or 'nothing'}."
            + "".join(validate.did_you_mean(key, [*needed, *others]) for key in unknown)
        )
    values[key] = getattr(LossGeometry, kind)(**table)


def _parameters(kind: str) -> tuple[list[str], list[str]]:
    """The needed and the optional arguments of a class method of `LossGeometry`."""
    found = inspect.signature(getattr(LossGeometry, kind)).parameters
    needed = [name for name, p in found.items() if p.default is p.empty]
    return needed, [name for name in found if name not in needed]


def loss_arguments(kind: str) -> str:
    """The arguments of a loss, in words."""
    needed, others = _parameters(kind)
    optional = f" (optional: {', '.join(others)})" if others else ""
    return f"{' and '.join(needed)}{optional}"


def _epochs_to_steps(values: dict[str, Any]) -> None:
    epochs = values.pop("epochs", None)
    if epochs is None:
        return
    if values["type"] == "BlockCoordinateDpEvent":
        values["num_epochs"] = epochs
        return
    if "num_steps" in values:
        raise ValueError("Expected one of epochs and num_steps, got both.")
    sizes = {name: values.get(name) for name in ("batch_size", "dataset_size")}
    epochs, batch_size, dataset_size = (
        validate.integer(name, number, minimum=1)
        for name, number in {"epochs": epochs, **sizes}.items()
    )
    rate = parse_sampling_rate(BatchOrder.POISSON, values.get("sampling_rate"))
    values["num_steps"] = epochs * batches_per_pass(batch_size, dataset_size, rate)


def _names(flags: Iterable[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in flags)
