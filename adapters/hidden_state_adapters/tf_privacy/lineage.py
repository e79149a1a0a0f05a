"""Which private runs the weights of a model come from, as far as this process can tell.

A run that begins with weights that another private run left shows more of the examples than its own
event says. Their digests tell: this process remembers those of weights that its runs left, and a
model or an optimizer writes them, with the runs behind them, into its configuration, so that
whoever loads the file is told. (A checkpoint of TensorFlow has none: that is your word.)
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import tensorflow as tf

from hidden_state_accountants.runs.base import Run, run_of
from hidden_state_adapters.tf_privacy.refusals import refusal

_SCHEMA = 1
_PRECISIONS = (tf.float32, tf.float64)


@attrs.frozen
class PastRun:
    """A run that is over, or that another process goes on with.

    Attributes:
        run_id: Of the run, wherever it goes on.
        state: The `Run.state_dict` of its steps.
    """

    run_id: str
    state: Mapping[str, Any]

    def run(self) -> Run:
        """The run with its steps."""
        return run_of(self.state)

    @classmethod
    def of_plain(cls, plain: Any) -> PastRun:
        """Inverse of `attrs.asdict`.

        Raises:
            ValueError: It is damaged.
        """
        try:
            past = cls(str(plain["run_id"]), dict(plain["state"]))
            past.run()
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"The record of an earlier run is damaged: {error}") from error
        return past


@attrs.define(eq=False)
class LiveRun:
    """A run that records of this process take part in, one after the other.

    Attributes:
        run_id: Its name.
        earlier: The runs that its initial weights come from.
        owner: The record that may go on with it.
        run: Its steps; None before the first one.
        steps: The steps of the optimizer that were recorded, here or in a state.
        released: The last of them whose weights were released.
        ended: Why there is no figure for it any more; "" as long as there is.
        whole: Gives it with all steps that could follow, where the weights may choose how many
            do, or which are kept; None elsewhere.
    """

    run_id: str
    earlier: tuple[PastRun, ...] = ()
    owner: weakref.ref[Any] | None = None
    run: Run | None = None
    steps: int = 0
    released: int = 0
    ended: str = ""
    whole: Callable[[], Run] | None = None

    def belongs_to(self, record: Any) -> bool:
        """Whether it is this record that may go on."""
        return self.owner is not None and self.owner() is record

    def check_newest(self, steps: int, discard_later_steps: bool) -> None:
        """Raises UnsupportedRunError if steps after a state would be forgotten.

        Args:
            steps: Of the optimizer, that the state knows.
            discard_later_steps: Whether the user says that nothing of the others was ever seen.
        """
        if self.released > steps:
            raise refusal(
                f"Expected the newest released state of the run, got that of step {steps}: the "
                f"weights after step {self.released} were released and would be forgotten. Go on "
                "from there, or later."
            )
        if self.steps > steps and not discard_later_steps:
            raise refusal(
                f"Expected the newest state of the run, got that of step {steps}: {self.steps} "
                "steps were taken. If nothing that the later ones computed was ever seen by "
                "anybody, nor made you go back, say discard_later_steps=True; it becomes a listed "
                "assumption."
            )

    def past(self) -> tuple[PastRun, ...]:
        """It, as it is now, after those before it."""
        assert self.run is not None
        run = self.run if self.whole is None else self.whole()
        return (*self.earlier, PastRun(self.run_id, run.state_dict()))


@attrs.frozen
class Origin:
    """Where weights come from.

    Attributes:
        run_id: Of the run that left them; "" if nobody recorded it.
        step: The steps of its event by then.
        runs: It and those before it, as a file tells; empty for a run of this process.
        why: Why what they show is not known; "" if it is.
    """

    run_id: str = ""
    step: int = 0
    runs: tuple[PastRun, ...] = ()
    why: str = ""


_live: dict[str, LiveRun] = {}
_origins: dict[str, Origin] = {}


def live_run(run_id: str) -> LiveRun:
    """The run of this name in this process."""
    return _live.setdefault(run_id, LiveRun(run_id))


def digest(variable: Any) -> str:
    """Of the values of a variable, bit by bit; the same in every process."""
    value = _value(variable)
    content = hashlib.sha256(f"{value.dtype.str} {value.shape} ".encode())
    content.update(np.ascontiguousarray(value).tobytes())
    return content.hexdigest()


def is_telling(variable: Any) -> bool:
    """Whether nobody else has the same values by chance: zeros and ones are how biases begin."""
    value = _value(variable)
    if value.size == 1:
        return value.item() not in (0.0, 1.0)
    return bool((value != value.flat[0]).any())


def _value(variable: Any) -> np.ndarray:
    with tf.init_scope():  # also while a graph is traced
        return np.asarray(variable.numpy())


def remember(digests: Iterable[str], origin: Origin) -> None:
    """Notes where weights with these digests come from.

    What is known of the same weights is not given up for less: a run that trained a part of a model
    again has changed what the one before it left, but not the rest.
    """
    for one in digests:
        if not origin.why or one not in _origins:
            _origins[one] = origin


def to_plain(digests: Sequence[str], origin: Origin) -> dict[str, Any]:
    """The note as plain types, with the runs as they are now."""
    live = _live.get(origin.run_id)
    runs = live.past() if live is not None and live.run is not None else origin.runs
    return {
        "schema": _SCHEMA,
        "weights": list(digests),
        "run_id": origin.run_id,
        "step": origin.step,
        "why": origin.why,
        "runs": [] if origin.why else [attrs.asdict(past) for past in runs],
    }


def read_plain(plain: Mapping[str, Any]) -> None:
    """Notes what `to_plain` returned in another process.

    Raises:
        ValueError: It is damaged.
    """
    if plain.get("schema") != _SCHEMA:
        raise ValueError(
            f"Expected the runs behind the weights with schema {_SCHEMA}, got "
            f"{plain.get('schema')!r}."
        )
    runs = tuple(PastRun.of_plain(past) for past in plain["runs"])
    origin = Origin(plain["run_id"], plain["step"], runs, plain["why"])
    for one in plain["weights"]:
        _origins.setdefault(one, origin)  # a run of this process knows more


def origin_of(variable: Any) -> Origin | None:
    """Where the weights in a variable come from; None if that is not known."""
    if variable.dtype.base_dtype not in _PRECISIONS:
        return None
    return _origins.get(digest(variable))


def runs_of(origin: Origin, name: str) -> tuple[PastRun, ...]:
    """The runs behind weights, which count as released from here on.

    Args:
        origin: Of the weights.
        name: Of the variable that has them.

    Raises:
        UnsupportedRunError: It cannot be said what they show.
    """
    live = _live.get(origin.run_id)
    why = origin.why or (live.ended if live is not None else "")
    if why:
        raise refusal(
            f"Expected initial weights whose privacy is known, got {name}, which a private "
            f"optimizer trained: {why} Start from other weights (that they do not depend on the "
            "examples is then your word)."
        )
    if live is None or live.run is None:
        return origin.runs
    if origin.step == live.run.num_steps:
        live.run.release()
    elif origin.step not in live.run.release_steps:
        raise refusal(
            f"Expected the newest weights of a private run, got {name} as step {origin.step} left "
            f"it: the run went on to step {live.run.num_steps}, and the weights in between count "
            "as hidden. Start from the newest ones, or call release() before the run goes on."
        )
    return live.past()


def merged(runs: Iterable[PastRun]) -> tuple[PastRun, ...]:
    """The runs, each once.

    Raises:
        UnsupportedRunError: They are different parts of one run.
    """
    found: dict[str, PastRun] = {}
    for past in runs:
        other = found.setdefault(past.run_id, past)
        if other.state["num_steps"] != past.state["num_steps"]:
            raise refusal(
                "Expected initial weights that are one iterate of a private run, got several that "
                "different steps of it left. Start from what one step left."
            )
        if len(past.state["release_steps"]) > len(other.state["release_steps"]):
            found[past.run_id] = past
    return tuple(found.values())
