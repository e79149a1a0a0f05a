"""The flags that describe a run: every field of `LastIterateDpEvent` and of its loss."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hidden_state_accountants.cli import names

if TYPE_CHECKING:  # the help needs nothing of this
    from hidden_state_accountants.cli.run_file import RunDescription


def completed_by(known: Sequence[str]) -> Callable[[str], list[str]]:
    """What the shell proposes as a value."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in known if name.startswith(incomplete)]

    return complete


def _whole(text: str) -> int:
    """An integer, which may be written as 1e7 or 50_000."""
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        if float(text).is_integer():
            return int(float(text))
    raise ValueError(f"expected a whole number, got {text!r}")


def _flag(
    name: str, kind: Any, text: str, panel: str, known: Sequence[str] = (), *flags: str
) -> inspect.Parameter:
    """The flag of a field: `known` are the values that a shell completes, `flags` other names."""
    options: dict[str, Any] = {"help": text, "rich_help_panel": panel, "show_default": False}
    if kind is int:
        options |= {"parser": _whole, "metavar": "INTEGER"}
    if known:
        options["autocompletion"] = completed_by(known)
    annotation = Annotated[kind | None, typer.Option(*flags, **options)]
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=None, annotation=annotation)


def _panel(title: str, fields: Mapping[str, tuple[Any, ...]]) -> dict[str, inspect.Parameter]:
    return {
        name: _flag(name, kind, text, title, *more) for name, (kind, text, *more) in fields.items()
    }


_RUN_FIELDS = _panel(
    "The run",
    {
        "noise_multiplier": (float, "Noise std on the sum of gradients over the clip norm."),
        "learning_rate": (float, "Step size eta."),
        "clip_norm": (str, "Per-example clip norm C, or none (needs --lipschitz)."),
        "batch_size": (int, "b: what sums are divided by."),
        "dataset_size": (int, "n: records that take part."),
        "num_steps": (int, "T."),
        "epochs": (int, "Instead of --num-steps."),
        "batch_order": (str, f"One of {', '.join(names.ORDERS)}.", names.ORDERS),
        "weight_decay": (float, "Decoupled weight decay."),
        "prox_strong_convexity": (
            float,
            "Strong convexity of the regulariser of a prox after the noise.",
        ),
        "domain_diameter": (float, "Diameter (2 x radius) of the set projected on."),
        "release_steps": (str, "Steps after which the model is released too: 100,200."),
        "sampling_rate": (
            float,
            "Poisson: the rate of the loader; default: batch size / data set size.",
        ),
        "max_batch_size": (int, "Cap on poisson batches."),
        "record_position": (
            int,
            "Cyclic: account for the records of this batch ONLY (hsa profile: all).",
        ),
        "is_microbatched": (
            bool,
            "A record is a microbatch of several examples (needs --relation replace_one).",
            (),
            "--microbatched/--no-microbatched",
        ),
    },
)
_LOSS_FIELDS = _panel(
    "The loss, per example",
    {
        "loss": (str, f"none (default), {', '.join(names.LOSSES)}.", names.LOSSES),
        "smoothness": (float, "M of convex, smooth, ..."),
        "strong_convexity": (float, "Of strongly_convex."),
        "weak_convexity": (float, "Of weakly_convex."),
        "constant": (float, "Of hoelder."),
        "exponent": (float, "Of hoelder."),
        "lipschitz": (float, "Gradient norm bound before clipping."),
        "feature_norm": (float, "Of the losses of linear models: logistic, huber, ..."),
        "bias": (bool, "Whether a bias is trained as well.", (), "--bias/--no-bias"),
        "threshold": (float, "Of huber."),
        "scale": (float, "Of squared_error."),
        "loss_clip_norm": (float, "Of envelope losses."),
        "smoothing": (float, "Of envelope losses."),
    },
)
_ACCOUNTING_FIELDS = _panel(
    "Accounting",
    {
        "delta": (float, "Default 1e-5.", (), "--delta", "-d"),
        "relation": (
            str,
            f"{', '.join(names.RELATIONS)}; default replace_special.",
            names.RELATIONS,
        ),
        "group_size": (int, "Records that one person may have; default 1."),
    },
)
_FILE = inspect.Parameter(
    "file",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Argument(
            help="TOML file that describes the run (hsa init); - is the standard input.",
            show_default=False,
        ),
    ],
)


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return {
        name: parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(function, eval_str=True).parameters.items()
    }


def with_run(function: Callable[..., Any]) -> Callable[..., Any]:
    """A command whose first parameter makes a `RunDescription` of a file and the flags of a run.

    A parameter of the command stands instead of a flag of the same name. A command without `files`
    gets the argument FILE.
    """
    own = _parameters(function)
    own.pop("run")
    has_files = "files" in own
    first = own.pop("files") if has_files else _FILE
    replaced = {*own, *({"delta"} if "epsilon" in own else ())}  # the answer is no flag
    accounting = {name: p for name, p in _ACCOUNTING_FIELDS.items() if name not in replaced}

    @functools.wraps(function)
    def command(**values: Any) -> Any:
        fields = {name: values.pop(name) for name in _RUN_FIELDS}
        losses = {name: values.pop(name) for name in _LOSS_FIELDS}
        losses["clip_norm"] = losses.pop("loss_clip_norm")  # --clip-norm is that of the run
        delta, relation, group_size = (
            values.pop(name) if name in accounting else None for name in _ACCOUNTING_FIELDS
        )
        path = None if has_files else values.pop("file")

        def run(
            file: Path | None = path, defaults: Mapping[str, Any] | None = None
        ) -> RunDescription:
            from hidden_state_accountants.cli import run_file

            flags = _plain(fields)
            return run_file.read(file, flags, losses, delta, relation, group_size, defaults or {})

        return function(run, **values)

    parameters = [first, *own.values()]
    for group in (_RUN_FIELDS, _LOSS_FIELDS, accounting):
        parameters += group.values()
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _plain(fields: dict[str, Any]) -> dict[str, Any]:
    """The values in the form of `to_dict`."""
    plain = dict(fields)
    if plain["clip_norm"] not in (None, "none"):
        plain["clip_norm"] = _number("clip_norm", plain["clip_norm"], float)
    if plain["release_steps"] is not None:
        steps = filter(None, plain["release_steps"].replace(" ", "").split(","))
        plain["release_steps"] = [_number("release_steps", step, int) for step in steps]
    return plain


def _number(name: str, text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"Expected {name} to be a number, got {text!r}.") from None
