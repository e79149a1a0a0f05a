"""The commands of `hsa`."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import attrs
import dp_accounting
import typer

import hidden_state_accountants as hsa
from hidden_state_accountants import validate
from hidden_state_accountants.accountants import BoundAccountant
from hidden_state_accountants.best_bound import check_covered
from hidden_state_accountants.cli import output, run_file
from hidden_state_accountants.figures import large_delta, round_up, text_up
from hidden_state_accountants.guarantee import Guarantee

_EXIT_BAD_INPUT = 2  # status, as of argparse and typer
_MOST_EPOCHS = 10_000  # where a search for them ends
_ClickError: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

app = typer.Typer(
    name="hsa",
    help="Privacy accounting of the model that you release: the last iterate.\n\n"
    "Describe the run by flags, or in a file (hsa init), or in a file with flags that change it.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
command = app.command(context_settings={"ignore_unknown_options": True})  # fields of the event

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FILE] [--FIELD VALUE]...",
        help="A file (hsa init), - for the standard input, or a checkpoint that an engine of "
        "Opacus saved; and any field of the run, its loss (--loss, and its parameters) and "
        "--epochs as flags. hsa init - lists them all.",
        show_default=False,
    ),
]
Delta = Annotated[
    float | None, typer.Option("--delta", "-d", help="Default 1e-5.", show_default=False)
]
Relation = Annotated[
    str | None,
    typer.Option(
        help="add_or_remove_one, replace_one or replace_special, the default.", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON; infinity is the text inf.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no warnings.")]
_LAST_ITERATE = "last_iterate"
Accountant = Annotated[
    str,
    typer.Option(
        help="last_iterate (the smallest proven bound), or a bound that hsa compare names."
    ),
]


def run(arguments: Sequence[str]) -> int:
    """Runs one command; the exit status. Bad input is one line on stderr and status 2."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    group = typer.main.get_command(app)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: output.note(f"warning: {message}")
            status = group.main(
                list(arguments) or ["--help"], prog_name="hsa", standalone_mode=False
            )
        return status if isinstance(status, int) else 0
    except typer.Abort:
        return 130
    except _ClickError as error:
        output.note(error.format_message())
    except OSError as error:
        output.note(f"{error.filename}: {error.strerror}" if error.filename else str(error))
    except (ImportError, TypeError, ValueError) as error:
        output.note(str(error))
    return _EXIT_BAD_INPUT


def _version(value: bool) -> None:
    if value:
        typer.echo(hsa.__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


def _maker(found: run_file.RunDescription, accountant: str) -> Callable[[], Any]:
    """A function that makes the accountant that was asked for; ValueError if it does not apply."""
    name = accountant.replace("-", "_")
    bounds = {bound.name: bound for bound in hsa.BOUNDS}
    event, relation = found.event, found.neighboring_relation
    if name == _LAST_ITERATE:
        if not isinstance(event, dp_accounting.ComposedDpEvent):  # of a checkpoint
            check_covered(event, relation)
        return lambda: hsa.LastIterateAccountant(relation)
    if name not in bounds:
        raise ValueError(
            f"Expected --accountant to be one of {', '.join([_LAST_ITERATE, *bounds])}, got "
            f"{name!r}.{validate.did_you_mean(name, [_LAST_ITERATE, *bounds])}"
        )
    bound = bounds[name]
    if not isinstance(event, bound.event_type):
        raise ValueError(
            f"Expected a {bound.event_type.__name__} for --accountant {name}, got a "
            f"{type(event).__name__}."
        )
    if unmet := bound.check(event, relation):
        raise ValueError(f"{name} does not cover the run: {'; '.join(map(str, unmet))}")
    return lambda: BoundAccountant(relation, bound)


def _guarantee(found: run_file.RunDescription, accountant: str, quiet: bool) -> Guarantee:
    make = _maker(found, accountant)
    with warnings.catch_warnings():
        if quiet:
            warnings.simplefilter("ignore")
        proved: Guarantee = make().compose(found.event).guarantee
    return proved


@command
def epsilon(
    run: Words = None,
    delta: Delta = None,
    relation: Relation = None,
    accountant: Accountant = _LAST_ITERATE,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Prints the epsilon of a run.

    Example: `hsa epsilon --noise-multiplier 2 --learning-rate 0.5 --clip-norm 1 --batch-size 500
    --dataset-size 50000 --epochs 200 --batch-order cyclic --loss softmax_cross_entropy
    --feature-norm 1 --weight-decay 0.1 --delta 1e-5`, `hsa epsilon checkpoint.pt`
    """
    found = run_file.read(run or (), delta=delta, relation=relation)
    guarantee = _guarantee(found, accountant, quiet)
    value = guarantee.epsilon(found.delta)
    output.guarantee(found, guarantee, {"epsilon": value, "delta": found.delta}, json)


@command
def delta(
    epsilon: Annotated[float, typer.Option(help="The epsilon that it is for.")],
    run: Words = None,
    relation: Relation = None,
    accountant: Accountant = _LAST_ITERATE,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Prints the delta of a run at a given epsilon.

    Example: `hsa delta run.toml --epsilon 2`
    """
    found = run_file.read(run or (), relation=relation)
    guarantee = _guarantee(found, accountant, quiet)
    value = guarantee.delta(epsilon)
    output.guarantee(found, guarantee, {"delta": value, "epsilon": epsilon}, json)


@command
def calibrate(
    target_epsilon: Annotated[float, typer.Option("--target-epsilon", "-e", help="To meet.")],
    run: Words = None,
    delta: Delta = None,
    relation: Relation = None,
    parameter: Annotated[str, typer.Option(help="What to change: noise or epochs.")] = "noise",
    accountant: Accountant = _LAST_ITERATE,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Finds the noise, or the number of epochs, for a given epsilon.

    The answer is rounded to the safe side, and its epsilon is the one printed.

    Examples: `hsa calibrate run.toml --target-epsilon 2`,
    `hsa calibrate run.toml --target-epsilon 2 --parameter epochs`
    """
    defaults: dict[str, dict[str, Any]] = {
        "noise": {"noise_multiplier": 1.0, "noise_std": 1.0, "noise_variance": 1.0},
        "epochs": {"epochs": 1},
    }
    if parameter not in defaults:
        raise ValueError(f"Expected --parameter to be noise or epochs, got {parameter!r}.")
    found = run_file.read(run or (), delta=delta, relation=relation, defaults=defaults[parameter])
    event, make = found.event, _maker(found, accountant)
    target: Any = (target_epsilon, found.delta, event)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # said once, below
        if parameter == "noise":
            value: float = round_up(hsa.calibrate_noise(*target, make_accountant=make), 8)
        else:
            value = hsa.calibrate_epochs(*target, make_accountant=make, max_epochs=_MOST_EPOCHS)
    if parameter == "noise":
        name = next(field for field in defaults["noise"] if hasattr(event, field))
        changes = {name: value}
    else:
        name, changes = "epochs", {"num_epochs": value}
        if not hasattr(event, "num_epochs"):
            changes = {"num_steps": value * event.batches_per_epoch}
        if value == _MOST_EPOCHS and not quiet:
            output.note(f"not even {value} epochs, the end of the search, are too many")
    found = attrs.evolve(found, event=attrs.evolve(event, **changes))
    guarantee = _guarantee(found, accountant, quiet)
    figures = {name: value, "epsilon": guarantee.epsilon(found.delta), "delta": found.delta}
    output.guarantee(found, guarantee, figures, json)


@command
def compare(
    run: Words = None,
    relation: Relation = None,
    delta: Annotated[
        list[float] | None,
        typer.Option("--delta", "-d", help="One or several; default 1e-5.", show_default=False),
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw a picture there, .png or .svg.", show_default=False)
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compares all accountants on a run, and says why those do not apply that do not.

    Flags change every run. Examples: `hsa compare run.toml --plot run.png`,
    `hsa compare a.toml b.toml -d 1e-5 -d 1e-6`,
    `hsa compare run.toml --noise-multiplier 4`
    """
    files, _ = run_file.split(run or ())
    flags = [word for word in run or () if word not in files]
    runs = {
        file or "run": run_file.read([*([file] if file else []), *flags], relation=relation)
        for file in files or [""]
    }
    relations = {found.neighboring_relation for found in runs.values()}
    if len(relations) > 1:
        raise ValueError(
            f"Expected one neighboring relation, got {len(relations)} in the files. Choose one "
            "with --relation."
        )
    compared = hsa.compare(
        {label: found.event for label, found in runs.items()},
        delta or [found.delta for found in runs.values()],
        relations.pop(),
        progress=output.progress(quiet),
    )
    if plot is not None:
        compared.plot(plot)
    if json:
        output.json(compared.to_dict())
    else:
        output.comparison(compared)


@command
def gain(
    run: Words = None,
    delta: Delta = None,
    relation: Relation = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Would my script gain, before I convert it? By how much, and what would help most?

    Example: `hsa gain run.toml`
    """
    found = run_file.read(run or (), delta=delta, relation=relation)
    output.progress(quiet)("gain: epsilons, noise at equal epsilon, single changes of the run")
    output.result(hsa.would_gain(found.event, found.delta, found.neighboring_relation), json)


@command
def audit(
    run: Words = None,
    delta: Delta = None,
    relation: Relation = None,
    claim_epsilon: Annotated[
        float | None,
        typer.Option(
            help="Audit (this, --delta) instead of the accountant's claim.", show_default=False
        ),
    ] = None,
    accountant: Accountant = _LAST_ITERATE,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Is a claim about my run false? Attacks it; exit status 1 if an attack refutes it.

    Examples: `hsa audit run.toml`, `hsa audit run.toml --claim-epsilon 0.5 --delta 1e-5`
    """
    found = run_file.read(run or (), delta=delta, relation=relation)
    claim: Any = (claim_epsilon, found.delta)
    if claim_epsilon is None:
        claim = _guarantee(found, accountant, quiet)
    report = hsa.audit(
        claim,
        found.event,
        neighboring_relation=found.neighboring_relation,
        target_delta=found.delta,
        progress=output.progress(quiet),
    )
    output.result(report, json)
    if report.violated:
        raise typer.Exit(1)


@command
def explain(
    run: Words = None,
    delta: Delta = None,
    relation: Relation = None,
    bounds: Annotated[
        bool, typer.Option("--bounds", help="Name the bounds that were not used, and why.")
    ] = False,
    accountant: Accountant = _LAST_ITERATE,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Names the theorem, the assumptions, and the changes that would help.

    Example: `hsa explain run.toml`
    """
    found = run_file.read(run or (), delta=delta, relation=relation)
    guarantee = _guarantee(found, accountant, quiet)
    output.progress(quiet)("explain: single changes of the run")
    text = guarantee.explain(found.delta, bounds=bounds)
    if not json:
        typer.echo(f"run: {found.event!r}\n{text}")
        return
    figures = {"epsilon": guarantee.epsilon(found.delta), "delta": found.delta}
    output.guarantee(found, guarantee, {**figures, "explanation": text.splitlines()}, json)


@command
def profile(
    run: Words = None, delta: Delta = None, relation: Relation = None, json: Json = False
) -> None:
    """Prints the epsilon of the records of each batch of an epoch. (Cyclic batches.)

    The epsilon of the run is the largest one. Example: `hsa profile run.toml`
    """
    found = run_file.read(run or (), delta=delta, relation=relation)
    epsilons = hsa.position_profile(found.event, found.delta, found.neighboring_relation).tolist()
    figures = {
        "epsilon": max(epsilons),
        "delta": found.delta,
        "neighboring_relation": found.neighboring_relation.name,
        "epsilon_by_position": epsilons,
    }
    if json:
        output.json(figures)
        return
    for position, value in enumerate(epsilons):
        typer.echo(f"records of batch {position} of every epoch: {text_up(value)}")


@app.command()
def recommend(
    dataset_size: Annotated[int, typer.Option(help="n: records; public.")],
    epsilon: Annotated[float, typer.Option("--epsilon", "-e", help="To meet.")],
    delta: Annotated[float, typer.Option("--delta", "-d", help="To meet.")] = 1e-5,
    classes: Annotated[int, typer.Option(help="2 trains one logit, more a softmax.")] = 2,
    features: Annotated[
        int | None, typer.Option(help="Their number; few allow for longer training.")
    ] = None,
    feature_norm: Annotated[
        float, typer.Option(help="Bound on the L2 norm of every record's features.")
    ] = 1.0,
    bias: Annotated[bool, typer.Option("--bias", help="A bias is trained as well.")] = False,
    loss: Annotated[
        str | None,
        typer.Option(
            help="softmax_cross_entropy, logistic or squared_error; default: by the classes."
        ),
    ] = None,
    clip_norm: Annotated[
        float | None, typer.Option(help="Of the gradient in the predictions; default: 0.3.")
    ] = None,
    weight_decay: Annotated[float, typer.Option(help="Decoupled.")] = 0.0,
    orders: Annotated[
        str | None,
        typer.Option(help="Batch orders that can be had: cyclic,full. Default: all."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    relation: Relation = "replace_special",
    json: Json = False,
) -> None:
    """Recommends runs that train a linear model with a given epsilon.

    Complete runs, the best first. No record is looked at.
    Example: `hsa recommend --dataset-size 50000 --epsilon 1 --classes 10`
    """
    found = hsa.recommend(
        dataset_size,
        epsilon,
        delta,
        classes=classes,
        features=features,
        feature_norm=feature_norm,
        bias=bias,
        loss=loss,
        clip_norm=clip_norm,
        weight_decay=weight_decay,
        orders=None if orders is None else orders.replace(" ", "").split(","),
        epochs=epochs,
        neighboring_relation=relation,
    )
    if text := large_delta(delta, dataset_size):
        output.note(text)
    output.result(found, json)


@app.command()
def init(
    file: Annotated[Path, typer.Argument(help="Where to write; - is the standard output.")] = Path(
        "run.toml"
    ),
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file.")] = False,
) -> None:
    """Writes a commented description of a run, to edit.

    Example: `hsa init run.toml && hsa epsilon run.toml`
    """
    if str(file) == "-":
        typer.echo(run_file.template(), nl=False)
        return
    if file.exists() and not force:
        raise ValueError(f"{file} exists. Choose another name, or --force.")
    file.write_text(run_file.template(), encoding="utf-8")
    typer.echo(f"Wrote {file}. Edit it, then: hsa epsilon {file}")
