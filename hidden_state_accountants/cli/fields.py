"""One table of what describes a run: the flags, the file that `hsa init` writes, the completion.

The help needs nothing but this table, so that it need not wait for the package; a test compares the
names with the package's.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

if TYPE_CHECKING:  # the help needs nothing of this
    from hidden_state_accountants.cli.run_file import RunDescription

BOUNDS = (
    "composition",
    "shifted_interpolation",
    "overlapping_laws",
    "hoelder",
    "langevin",
    "block_coordinate",
    "block_coordinate_published",
    "shuffled_once",
    "reshuffled",
    "balls_in_bins",
    "subsampling",
    "hidden_coins",
    "dice_sgd",
    "dice_sgd_published",
    "chien_li",
    "chien_li_published",
    "kong_ribero",
    "kong_ribero_published",
)
"""Of `hidden_state_accountants.bounds.BOUNDS`."""
LOSSES = (
    "convex",
    "envelope_hinge",
    "envelope_logistic",
    "envelope_softmax_cross_entropy",
    "envelope_squared_error",
    "generalized_linear",
    "hoelder",
    "huber",
    "linear",
    "logistic",
    "smooth",
    "softmax_cross_entropy",
    "squared_error",
    "strongly_convex",
    "weakly_convex",
)
"""The class methods of `LossGeometry`."""
RECOMMENDED_LOSSES = ("softmax_cross_entropy", "logistic", "squared_error")
"""Those that `hsa.recommend` knows."""
ORDERS = (
    "full",
    "cyclic",
    "shuffled_once",
    "reshuffled",
    "without_replacement",
    "poisson",
    "balls_in_bins",
    "balls_in_bins_redrawn",
)
"""The values of `BatchOrder`."""
RELATIONS = ("add_or_remove_one", "replace_one", "replace_special")
"""Of `NeighboringRelation`, in lower case."""


def _whole(text: str) -> int:
    """An integer, which may be written as 1e7 or 50_000."""
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        if float(text).is_integer():
            return int(float(text))
    raise ValueError(f"expected a whole number, got {text!r}")


def _number_or_none(text: str) -> float | str:
    with contextlib.suppress(ValueError):
        return text if text == "none" else float(text)
    raise ValueError(f"expected a number or none, got {text!r}")


def _whole_numbers(text: str) -> list[int]:
    return [_whole(part) for part in text.replace(" ", "").split(",") if part]


class Field(NamedTuple):
    """A field of a run.

    Attributes:
        kind: Of the flag's value: a type, or a function of its text.
        text: The help, and the comment in the file.
        example: The value in the file; "# " before it comments the line out, empty: no line.
        known: The values that a shell completes.
        flags: The names of the flag, if they are not that of the field.
    """

    kind: Any
    text: str
    example: str = ""
    known: Sequence[str] = ()
    flags: tuple[str, ...] = ()


RUN = {
    "noise_multiplier": Field(
        float, "Noise std on the SUM of gradients over the clip norm.", "2.0"
    ),
    "learning_rate": Field(float, "Step size eta.", "0.5"),
    "clip_norm": Field(
        _number_or_none,
        "Per-example clip norm C, or none (the loss then needs lipschitz).",
        "1.4143",
    ),
    "batch_size": Field(_whole, "b: what sums are divided by.", "500"),
    "dataset_size": Field(
        _whole, "n: records that take part; cyclic batches: a multiple of b.", "50_000"
    ),
    "num_steps": Field(_whole, "T."),
    "epochs": Field(_whole, "Instead of num_steps.", "200"),
    "batch_order": Field(str, f"One of {', '.join(ORDERS)}.", '"cyclic"', ORDERS),
    "weight_decay": Field(float, "Decoupled weight decay.", "0.1"),
    "prox_strong_convexity": Field(
        float, "Strong convexity of the regulariser of a prox after the noise.", "# 0.1"
    ),
    "domain_diameter": Field(float, "Diameter (2 x radius) of the set projected on.", "# 10.0"),
    "release_steps": Field(
        _whole_numbers, "Steps after which the model is released too: 100,200.", "# [1000]"
    ),
    "sampling_rate": Field(
        float, "Poisson: the rate of the loader; default: batch size / data set size.", "# 0.01"
    ),
    "max_batch_size": Field(_whole, "Cap on poisson batches.", "# 650"),
    "is_microbatched": Field(
        bool,
        "A record is a microbatch of several examples (needs the relation replace_one).",
        "# true",
        flags=("--microbatched/--no-microbatched",),
    ),
}
LOSS = {
    "loss": Field(str, f"none (default), {', '.join(LOSSES)}.", known=LOSSES),
    "smoothness": Field(float, "M of convex, smooth, ..."),
    "strong_convexity": Field(float, "Of strongly_convex."),
    "weak_convexity": Field(float, "Of weakly_convex."),
    "constant": Field(float, "Of hoelder."),
    "exponent": Field(float, "Of hoelder."),
    "lipschitz": Field(float, "Gradient norm bound before clipping."),
    "feature_norm": Field(float, "Of the losses of linear models: logistic, huber, ..."),
    "bias": Field(bool, "Whether a bias is trained as well.", flags=("--bias/--no-bias",)),
    "threshold": Field(float, "Of huber."),
    "scale": Field(float, "Of squared_error."),
    "loss_clip_norm": Field(float, "Of envelope losses."),
    "smoothing": Field(float, "Of envelope losses."),
}
ACCOUNTING = {
    "delta": Field(float, "Default 1e-5.", "1e-5", flags=("--delta", "-d")),
    "relation": Field(
        str, f"{', '.join(RELATIONS)}; default replace_special.", '"replace_special"', RELATIONS
    ),
}


def template() -> str:
    """The commented description of a run that `hsa init` writes."""
    from hidden_state_accountants.cli.run_file import loss_arguments

    def line(name: str, field: Field) -> str:
        mark = "# " if field.example.startswith("# ") else ""
        return f"{mark}{name} = {field.example.removeprefix('# ')}  # {field.text}"

    run = [line(name, field) for name, field in RUN.items() if field.example]
    losses = [f'# kind = "{kind}"  # {loss_arguments(kind)}' for kind in LOSSES]
    accounting = {
        "neighboring_relation" if n == "relation" else n: f for n, f in ACCOUNTING.items()
    }
    return "\n".join(
        [
            "# A training run, for hsa (hidden-state-accountants). Flags change single values:",
            "#     hsa epsilon run.toml --noise-multiplier 4",
            "",
            *run,
            "",
            "# What is known about the loss of ONE record. Without it: ordinary composition.",
            "# The clip norm above is just above the longest gradient of this loss, sqrt(2) *",
            "# feature_norm: clipping never acts.",
            "[loss]",
            'kind = "softmax_cross_entropy"',
            "feature_norm = 1.0  # every record's features have at most this norm",
            *losses,
            "",
            "# noise_multiplier, learning_rate, clip_norm and weight_decay may change while",
            "# training: instead of the number runs of equal values, and their numbers of steps.",
            "# [learning_rate]",
            "# values = [0.5, 0.05]",
            "# lengths = [15_000, 5_000]",
            "",
            "[accounting]",
            *(line(name, field) for name, field in accounting.items()),
            "",
        ]
    )


def completed_by(known: Sequence[str]) -> Callable[[str], list[str]]:
    """What the shell proposes as a value."""
    return lambda incomplete: [name for name in known if name.startswith(incomplete)]


def _flags(panel: str, fields: Mapping[str, Field]) -> dict[str, inspect.Parameter]:
    found = {}
    for name, field in fields.items():
        options: dict[str, Any] = {
            "help": field.text,
            "rich_help_panel": panel,
            "show_default": False,
        }
        kind: Any = field.kind
        if not isinstance(kind, type):
            options |= {"parser": kind, "metavar": "INTEGER" if kind is _whole else "TEXT"}
            kind = str
        if field.known:
            options["autocompletion"] = completed_by(field.known)
        annotation = Annotated[kind | None, typer.Option(*field.flags, **options)]
        found[name] = inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation
        )
    return found


_PANELS = {
    "run": _flags("The run", RUN),
    "loss": _flags("The loss, per example", LOSS),
    "accounting": _flags("Accounting", ACCOUNTING),
}
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
    signature = inspect.signature(function, eval_str=True)
    keyword = inspect.Parameter.KEYWORD_ONLY
    own = {name: p.replace(kind=keyword) for name, p in signature.parameters.items()}
    own.pop("run")
    first = own.pop("files", _FILE)
    replaced = {*own, *({"delta"} if "epsilon" in own else ())}  # the answer is no flag
    panels = {
        panel: {name: p for name, p in flags.items() if name not in replaced}
        for panel, flags in _PANELS.items()
    }

    @functools.wraps(function)
    def command(**values: Any) -> Any:
        given = {
            panel: {name: value for name in flags if (value := values.pop(name)) is not None}
            for panel, flags in panels.items()
        }
        path = values.pop("file", None)

        def run(
            file: Path | None = path, defaults: Mapping[str, Any] | None = None
        ) -> RunDescription:
            from hidden_state_accountants.cli import run_file

            return run_file.read(file, **given, defaults=defaults or {})

        return function(run, **values)

    parameters = [first, *own.values()]
    for flags in panels.values():
        parameters += flags.values()
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command
