"""Descriptions of runs: a TOML file, flags, or both, or a checkpoint of an engine, as an event."""

from __future__ import annotations

import inspect
import pickle
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
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
from hidden_state_accountants.events.loss_geometry import LossGeometry
from hidden_state_accountants.events.plain_types import SCHEMA
from hidden_state_accountants.runs.run import run_of

_KINDS = {kind.__name__: kind for kind in RUN_EVENTS}
LOSSES = {n: m for n, m in inspect.getmembers(LossGeometry, inspect.ismethod) if n[0] != "_"}
_PARAMETERS = {kind: inspect.signature(method).parameters for kind, method in LOSSES.items()}
# Every flag and its type, as the fields of the events and the parameters of the losses have it.
_TYPES = {"loss": "str", "epochs": "int", "loss_clip_norm": "float"}
_TYPES |= {name: str(p.annotation) for kind in LOSSES for name, p in _PARAMETERS[kind].items()}
_TYPES |= {f.name: str(f.type) for kind in reversed(RUN_EVENTS) for f in attrs.fields(kind)}


@attrs.frozen
class RunDescription:
    """A run, the target delta, and the neighbouring relation."""

    event: Any
    delta: float = attrs.field(converter=validate.target_delta)
    neighboring_relation: NeighboringRelation = attrs.field(converter=validate.neighboring_relation)


def split(arguments: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
    """The names of files, and the values of flags by name; one without a value is True."""
    files, flags, left = [], {}, list(arguments)
    while left:
        word = left.pop(0)
        if not word.startswith("--"):
            files.append(word)
            continue
        flag, is_one_word, text = word.partition("=")
        name = flag[2:].replace("-", "_")
        if name not in _TYPES:
            hint = validate.did_you_mean(name, _TYPES).replace("_", "-")
            raise ValueError(f"No such option: {flag}.{hint}")
        if not is_one_word:
            text = "true" if _TYPES[name] == "bool" or not left else left.pop(0)
        flags[name] = _value(flag, _TYPES[name], text)
    return files, flags


def _value(flag: str, kind: str, text: str) -> Any:
    words = "a number"
    try:
        if kind.startswith("int"):
            words = "a whole number"
            return _whole(text)
        if kind.startswith("tuple"):
            words = "whole numbers, such as 100,200"
            return [_whole(part) for part in text.split(",")]
        if kind.startswith("bool"):
            words = "true or false"
            return {"true": True, "false": False}[text]
        if kind.startswith("float"):
            return text if text == "none" and "None" in kind else float(text)
    except (KeyError, ValueError):
        raise ValueError(f"Expected {flag} to be {words}, got {text!r}.") from None
    return text


def _whole(text: str) -> int:
    """An integer, which may be written as 1e7 or 50_000."""
    if text.lstrip("+-").replace("_", "").isdigit():
        return int(text)
    number = float(text)
    if not number.is_integer():
        raise ValueError
    return int(number)


def read(
    arguments: Sequence[str],
    *,
    delta: float | None = None,
    relation: str | None = None,
    defaults: Mapping[str, Any] | None = None,
) -> RunDescription:
    """The run in a file, with the values of the flags instead where given.

    Args:
        arguments: At most one file (TOML, - for the standard input, or a checkpoint), and flags:
            fields of the event, "epochs" for num_steps, the loss and its parameters.
        delta: In place of that of the file.
        relation: In place of that of the file.
        defaults: Fields, or "epochs", that need not be given, as far as the event has them.

    Raises:
        OSError: The file cannot be read.
        TypeError, ValueError: No run can have these values; the text names the file.
    """
    files, flags = split(arguments)
    if len(files) > 1:
        raise ValueError(f"Expected one file, got {', '.join(files)}.")
    path = files[0] if files else None
    given = {"delta": delta, "neighboring_relation": relation}
    given = {name: value for name, value in given.items() if value is not None}
    accounting = {"delta": 1e-5, "neighboring_relation": "replace_special"}
    try:
        if path is not None and Path(path).suffix in (".pt", ".pth"):
            return _of_checkpoint(path, flags, given)
        values = {} if path is None else _toml(path)
        table = values.pop("accounting", {})
        validate.unknown_keys("[accounting]", table, accounting)
        event = _event(values, flags, defaults or {}, is_of_flags=path is None)
        return RunDescription(event, **(accounting | table | given))
    except (TypeError, ValueError) as error:
        if path is None:
            raise
        flags_too = " with these flags" if flags or given else ""
        raise ValueError(f"{path}{flags_too}: {error}") from error


# Files


def _toml(path: str) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
        return dict(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"not a TOML file: {error}") from None


class _Unread:
    """Stands for any object of a checkpoint but numbers, texts, lists and dictionaries."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def __setstate__(self, state: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


class _PlainUnpickler(pickle.Unpickler):
    """Reads plain types, and calls nothing that a file names."""

    def find_class(self, module: str, name: str) -> Any:
        return OrderedDict if (module, name) == ("collections", "OrderedDict") else _Unread

    def persistent_load(self, pid: Any) -> None:
        return None


def _of_checkpoint(path: str, flags: Mapping[str, Any], given: Mapping[str, Any]) -> RunDescription:
    """The runs that an engine of Opacus saved, all together; no code of the file is run."""
    if flags:
        raise ValueError(f"Expected no {_names(flags)} beside a run that has happened.")
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(name) as stored:
                state = _PlainUnpickler(stored).load()["privacy_accountant_state_dict"]
        runs, relation = state["runs"], state["neighboring_relation"]
    except (zipfile.BadZipFile, pickle.UnpicklingError, StopIteration, KeyError, TypeError):
        raise ValueError("not a checkpoint that HiddenStatePrivacyEngine saved") from None
    if state.get("refusals"):
        raise ValueError(f"no guarantee: {'; '.join(map(str, state['refusals']))}")
    asked = given.get("neighboring_relation", relation)
    if validate.neighboring_relation(asked).name != relation:
        raise ValueError(f"Expected the relation of the checkpoint, {relation}, got {asked}.")
    events = [run_of(run).event() for run in runs if run["num_steps"]]
    if not events:
        raise ValueError("the checkpoint has no run with a step")
    together = events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(events)
    return RunDescription(together, given.get("delta", 1e-5), relation)


# Events


def _event(
    values: dict[str, Any], flags: dict[str, Any], defaults: Mapping[str, Any], is_of_flags: bool
) -> dp_accounting.DpEvent:
    name = values.setdefault("type", "LastIterateDpEvent")
    if name not in _KINDS:
        raise ValueError(f"Expected type to be one of {', '.join(_KINDS)}, got {name!r}.")
    values.setdefault("schema", SCHEMA)
    fields = {field.name: field for field in attrs.fields(_KINDS[name])}
    for key, value in values.items():  # TOML has no 1e7 among its integers
        if _TYPES.get(key, "").startswith("int") and isinstance(value, float):
            values[key] = int(value) if value.is_integer() else value
    lengths = ("epochs", "num_steps", "num_epochs")
    if any(key in flags for key in lengths):
        values = {key: value for key, value in values.items() if key not in lengths}
    of_run = {key for key in flags if (key in fields or key == "epochs") and key != "loss"}
    values |= {key: flags[key] for key in of_run}
    _merge_loss(values, {key: value for key, value in flags.items() if key not in of_run})
    for key, value in defaults.items():
        if key in fields or (key == "epochs" and not any(length in values for length in lengths)):
            values.setdefault(key, value)
    _epochs_to_steps(values)
    missing = [k for k, f in fields.items() if f.default is attrs.NOTHING and k not in values]
    if missing and is_of_flags:
        names = _names(missing).replace("--num-steps", "--epochs (or --num-steps)")
        raise ValueError(f"Missing {names}. Or describe the run in a file: hsa init run.toml.")
    event: dp_accounting.DpEvent = _KINDS[name].from_dict(values)
    return event


def _merge_loss(values: dict[str, Any], flags: dict[str, Any]) -> None:
    """Puts a `LossGeometry` into the values, from their table and the flags."""
    key = "block_loss" if values["type"] == "BlockCoordinateDpEvent" else "loss"
    if "loss_clip_norm" in flags:  # --clip-norm is that of the run
        flags["clip_norm"] = flags.pop("loss_clip_norm")
    table = values.pop(key, {})
    if not isinstance(table, dict):
        raise ValueError(f"Expected [{key}] to be a table with a kind, got {table!r}.")
    if "loss" in flags:  # nothing of the file's is left
        table = {"kind": flags.pop("loss").replace("-", "_")}
    table = table | flags
    if not table or table == {"kind": "none"}:
        return
    kind = table.pop("kind", None)
    if kind not in LOSSES:
        raise ValueError(
            f"Expected loss to be one of none, {', '.join(LOSSES)}, got {kind!r}."
            f"{validate.did_you_mean(kind, LOSSES)}"
        )
    if {"weak_convexity", "exponent"} <= set(table):
        values[key] = {"kind": kind, **table}  # as in the dictionary form of an event
        return
    needed = {name for name, p in _PARAMETERS[kind].items() if p.default is p.empty}
    if not needed <= set(table) <= set(_PARAMETERS[kind]):
        raise ValueError(
            f"Expected {loss_arguments(kind)} for the loss {kind}, got "
            f"{', '.join(sorted(table)) or 'nothing'}."
        )
    values[key] = LOSSES[kind](**table)


def loss_arguments(kind: str) -> str:
    """The arguments of a loss, in words."""
    needed = [name for name, p in _PARAMETERS[kind].items() if p.default is p.empty]
    others = [name for name in _PARAMETERS[kind] if name not in needed]
    return " and ".join(needed) + (f" (optional: {', '.join(others)})" if others else "")


def _epochs_to_steps(values: dict[str, Any]) -> None:
    if "epochs" not in values:
        return
    epochs = validate.integer("epochs", values.pop("epochs"), minimum=1)
    if values["type"] == "BlockCoordinateDpEvent":
        values["num_epochs"] = epochs
        return
    if "num_steps" in values:
        raise ValueError("Expected one of epochs and num_steps, got both.")
    batch_size, dataset_size = (
        validate.integer(name, values.get(name), minimum=1)
        for name in ("batch_size", "dataset_size")
    )
    rate = parse_sampling_rate(BatchOrder.POISSON, values.get("sampling_rate"))
    values["num_steps"] = epochs * batches_per_pass(batch_size, dataset_size, rate)


def _names(flags: Iterable[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in flags)


# The commented description of a run that `hsa init` writes

_RUN = """\
# A training run, for hsa (hidden-state-accountants). Flags change single values:
#     hsa epsilon run.toml --noise-multiplier 4

noise_multiplier = 2.0  # noise std on the SUM of gradients over the clip norm
learning_rate = 0.5  # step size eta
clip_norm = 1.4143  # per-example clip norm C, or "none" (the loss then needs lipschitz)
batch_size = 500  # b: what sums are divided by
dataset_size = 50_000  # n: records that take part; cyclic batches: a multiple of b
epochs = 200  # or num_steps
batch_order = "cyclic"  # full, cyclic, shuffled_once, reshuffled, without_replacement, poisson,
# balls_in_bins or balls_in_bins_redrawn
weight_decay = 0.1  # decoupled
# prox_strong_convexity = 0.1  # of the regulariser of a prox after the noise
# domain_diameter = 10.0  # diameter (2 x radius) of the set projected on
# release_steps = [1000]  # after which the model is released too; as a flag 100,200
# sampling_rate = 0.01  # poisson: the rate of the loader; default: batch size / data set size
# max_batch_size = 650  # cap on poisson batches
# is_microbatched = true  # a record is a microbatch of several examples (needs replace_one)

# What is known about the loss of ONE record. Without it: ordinary composition.
# The clip norm above is just above the longest gradient of this loss, sqrt(2) * feature_norm:
# clipping never acts. As flags: --loss logistic --feature-norm 1, and --loss-clip-norm for the
# clip_norm of an envelope.
[loss]
kind = "softmax_cross_entropy"
feature_norm = 1.0  # every record's features have at most this norm
"""
_REST = """
# noise_multiplier, learning_rate, clip_norm and weight_decay may change while training: instead of
# the number runs of equal values, and their numbers of steps.
# [learning_rate]
# values = [0.5, 0.05]
# lengths = [15_000, 5_000]

[accounting]
delta = 1e-5  # default 1e-5
neighboring_relation = "replace_special"  # or add_or_remove_one, replace_one
"""


def template() -> str:
    """Returns the text, with the arguments of every loss."""
    losses = [f'# kind = "{kind}"  # {loss_arguments(kind)}\n' for kind in LOSSES]
    return "".join([_RUN, *losses, _REST])
