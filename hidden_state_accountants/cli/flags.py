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

_RUN, _LOSS, _ACCOUNTING = "The run", "The loss, per example", "Accounting"
_ORDERS = ", ".join(names.ORDERS)


def _option(text: str, panel: str, *flags: str, **options: Any) -> Any:
    return typer.Option(*flags, help=text, rich_help_panel=panel, show_default=False, **options)


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


def _count(text: str) -> Any:
    return _option(text, _RUN, parser=_whole, metavar="INTEGER")


def _run_fields(
    noise_multiplier: Annotated[
        float | None, _option("Noise std on the sum of gradients over the clip norm.", _RUN)
    ] = None,
    learning_rate: Annotated[float | None, _option("Step size eta.", _RUN)] = None,
    clip_norm: Annotated[
        str | None, _option("Per-example clip norm C, or none (needs --lipschitz).", _RUN)
    ] = None,
    batch_size: Annotated[int | None, _count("b: what sums are divided by.")] = None,
    dataset_size: Annotated[int | None, _count("n: records that take part.")] = None,
    num_steps: Annotated[int | None, _count("T.")] = None,
    epochs: Annotated[int | None, _count("Instead of --num-steps.")] = None,
    batch_order: Annotated[
        str | None,
        _option(f"One of {_ORDERS}.", _RUN, autocompletion=completed_by(names.ORDERS)),
    ] = None,
    weight_decay: Annotated[float | None, _option("Decoupled weight decay.", _RUN)] = None,
    prox_strong_convexity: Annotated[
        float | None,
        _option("Strong convexity of the regulariser of a prox after the noise.", _RUN),
    ] = None,
    domain_diameter: Annotated[
        float | None, _option("Diameter (2 x radius) of the set projected on.", _RUN)
    ] = None,
    release_steps: Annotated[
        str | None, _option("Steps after which the model is released too: 100,200.", _RUN)
    ] = None,
    sampling_rate: Annotated[
        float | None,
        _option("Poisson: the rate of the loader; default: batch size / data set size.", _RUN),
    ] = None,
    max_batch_size: Annotated[int | None, _count("Cap on poisson batches.")] = None,
    record_position: Annotated[
        int | None,
        _option("Cyclic: account for the records of this batch ONLY (hsa profile: all).", _RUN),
    ] = None,
    is_microbatched: Annotated[
        bool | None,
        _option(
            "A record is a microbatch of several examples (needs --relation replace_one).",
            _RUN,
            "--microbatched/--no-microbatched",
        ),
    ] = None,
) -> None: ...


def _loss_fields(
    loss: Annotated[
        str | None,
        _option(
            f"none (default), {', '.join(names.LOSSES)}.",
            _LOSS,
            autocompletion=completed_by(names.LOSSES),
        ),
    ] = None,
    smoothness: Annotated[float | None, _option("M of convex, smooth, ...", _LOSS)] = None,
    strong_convexity: Annotated[float | None, _option("Of strongly_convex.", _LOSS)] = None,
    weak_convexity: Annotated[float | None, _option("Of weakly_convex.", _LOSS)] = None,
    constant: Annotated[float | None, _option("Of hoelder.", _LOSS)] = None,
    exponent: Annotated[float | None, _option("Of hoelder.", _LOSS)] = None,
    lipschitz: Annotated[
        float | None, _option("Gradient norm bound before clipping.", _LOSS)
    ] = None,
    feature_norm: Annotated[
        float | None, _option("Of the losses of linear models: logistic, huber, ...", _LOSS)
    ] = None,
    bias: Annotated[
        bool | None, _option("Whether a bias is trained as well.", _LOSS, "--bias/--no-bias")
    ] = None,
    threshold: Annotated[float | None, _option("Of huber.", _LOSS)] = None,
    scale: Annotated[float | None, _option("Of squared_error.", _LOSS)] = None,
    loss_clip_norm: Annotated[float | None, _option("Of envelope losses.", _LOSS)] = None,
    smoothing: Annotated[float | None, _option("Of envelope losses.", _LOSS)] = None,
) -> None: ...


def _accounting(
    delta: Annotated[float | None, _option("Default 1e-5.", _ACCOUNTING, "--delta", "-d")] = None,
    relation: Annotated[
        str | None,
        _option(
            f"{', '.join(names.RELATIONS)}; default replace_special.",
            _ACCOUNTING,
            autocompletion=completed_by(names.RELATIONS),
        ),
    ] = None,
    group_size: Annotated[
        int | None,
        _option(
            "Records that one person may have; default 1.",
            _ACCOUNTING,
            parser=_whole,
            metavar="INTEGER",
        ),
    ] = None,
) -> None: ...


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    return {
        name: parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(function, eval_str=True).parameters.items()
    }


_RUN_FIELDS, _LOSS_FIELDS = _parameters(_run_fields), _parameters(_loss_fields)
_ACCOUNTING_FIELDS = _parameters(_accounting)
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
