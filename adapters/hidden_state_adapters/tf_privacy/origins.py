"""Where weights come from: the private runs behind them, in this process, in files, in a state.

A run that begins with weights that another private run left shows more of the examples than its own
event says. Their digests tell: this process remembers those of weights that its runs left, and a
model or an optimizer writes them, with the runs behind them, into its configuration, so that
whoever loads the file is told. (A checkpoint of TensorFlow has none: that is declared by you.)
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import numpy as np
import tensorflow as tf
from dp_accounting import NeighboringRelation

from hidden_state_accountants import UnsupportedRunError, validate
from hidden_state_accountants.runs.run import Run, run_of
from hidden_state_adapters.tf_privacy import keras_api
from hidden_state_adapters.tf_privacy.refusals import refusal
from hidden_state_adapters.tf_privacy.settings import Declared

_SCHEMA = 1  # of a note, and of a state
_PRECISIONS = (tf.float32, tf.float64)
_ATTRIBUTE = "_hidden_state_training"  # of a variable: the last optimizer that trained it


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

    def past(self, name: str) -> tuple[PastRun, ...]:
        """The runs behind the weights, which count as released from here on.

        Args:
            name: Of the variable that has them.

        Raises:
            UnsupportedRunError: It cannot be said what they show.
        """
        live = _live.get(self.run_id)
        why = self.why or (live.ended if live is not None else "")
        if why:
            raise refusal(
                f"Expected initial weights whose privacy is known, got {name}, which a private "
                f"optimizer trained: {why} Start from other weights (that they do not depend on "
                "the examples is then declared by you)."
            )
        if live is None or live.run is None:
            return self.runs
        if self.step == live.run.num_steps:
            live.run.release()
        elif self.step not in live.run.release_steps:
            raise refusal(
                f"Expected the newest weights of a private run, got {name} as step {self.step} "
                f"left it: the run went on to step {live.run.num_steps}, and the weights in between"
                " count as hidden. Start from the newest ones, or call release() before the run "
                "goes on."
            )
        return live.past()


_live: dict[str, LiveRun] = {}
_origins: dict[str, Origin] = {}  # by the digests of weights


def live_run(run_id: str) -> LiveRun:
    """The run of this name in this process."""
    return _live.setdefault(run_id, LiveRun(run_id))


def digest(variable: Any) -> str:
    """Of the values of a variable, bit by bit; the same in every process."""
    value = _value(variable)
    content = hashlib.sha256(f"{value.dtype.str} {value.shape} ".encode())
    content.update(np.ascontiguousarray(value).tobytes())
    return content.hexdigest()


def _value(variable: Any) -> np.ndarray:
    with tf.init_scope():  # also while a graph is traced
        return np.asarray(variable.numpy())


def _is_telling(variable: Any) -> bool:
    """Whether nobody else has the same values by chance: zeros and ones are how biases begin."""
    value = _value(variable)
    if value.size == 1:
        return value.item() not in (0.0, 1.0)
    return bool((value != value.flat[0]).any())


def origin_of(variable: Any) -> Origin | None:
    """Where the weights in a variable come from; None if that is not known."""
    if variable.dtype.base_dtype not in _PRECISIONS:
        return None
    return _origins.get(digest(variable))


def read_plain(plain: Mapping[str, Any]) -> None:
    """Notes what `Training.note` returned in another process.

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


def _merged(runs: Iterable[PastRun]) -> tuple[PastRun, ...]:
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


class Trainer(Protocol):
    """What is asked of whoever makes steps."""

    @property
    def has_stepped(self) -> bool:
        """Whether it took a step."""

    def is_iterate(self, variables: Sequence[Any]) -> bool:
        """Whether the variables are as its last step left them."""


class Training:
    """The variables of one trainer; they refer to it as long as no other one trains them.

    Attributes:
        follows_runs: Whether the weights come from earlier private runs, so that an account of this
            trainer alone is too small.
        where_from: Says what the steps so far have left; set by the record of a run, None without.

    Args:
        trainer: Makes the steps.
    """

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        self._initial: dict[int, tuple[Any, str]] = {}  # variables, digests before the first step
        self.follows_runs = False
        self.where_from: Callable[[], Origin] | None = None

    @tf.autograph.experimental.do_not_convert  # type: ignore[misc]
    def begin(self, variables: Sequence[Any]) -> None:
        """Notes that noisy gradients for these variables are made, before they move."""
        new = [v for v in variables if getattr(v, _ATTRIBUTE, None) is not self]
        if not new:
            return
        with tf.init_scope():  # the step may be traced
            if self.where_from is None:  # else the record has asked
                try:
                    self.follows_runs |= bool(self.past_runs(new))
                except UnsupportedRunError:
                    self.follows_runs = True
            for variable in new:
                setattr(variable, _ATTRIBUTE, self)
                self._initial.setdefault(id(variable), (variable, _digest_or_none(variable)))

    def resume(self, variables: Sequence[Any]) -> None:
        """Goes on with variables that the steps of another trainer have trained."""
        for variable in variables:
            setattr(variable, _ATTRIBUTE, self)
        self._initial = {id(variable): (variable, "") for variable in variables}

    @property
    def is_over(self) -> bool:
        """Whether another private trainer has trained the variables since."""
        others = [getattr(variable, _ATTRIBUTE) for variable, _ in self._initial.values()]
        return any(other is not self and other._trainer.has_stepped for other in others)

    def past_runs(self, variables: Iterable[Any]) -> tuple[PastRun, ...]:
        """The private runs that the weights come from, each once; they count as released.

        Raises:
            UnsupportedRunError: They come from a run whose event is not known, or from something
                that was made of the weights of a run.
        """
        others = [(variable, getattr(variable, _ATTRIBUTE, None)) for variable in variables]
        for other in {id(one): one for _, one in others if one is not None}.values():
            other.note()
        runs: list[PastRun] = []
        for variable, other in others:
            origin = origin_of(variable)
            if origin is not None:
                runs += origin.past(variable.name)
            elif other is not None and other._has_moved(variable):
                raise refusal(
                    f"Expected initial weights whose privacy is known, got {variable.name}, which "
                    "a private optimizer trained and something else changed since. Start from what "
                    "the run left, or from a new model (that its weights do not depend on the "
                    "examples is then declared by you)."
                )
        return _merged(runs)

    def _has_moved(self, variable: Any) -> bool:
        initial = self._initial[id(variable)][1]
        return self._trainer.has_stepped and digest(variable) != initial

    def refuse_earlier_runs(self) -> None:
        """Raises UnsupportedRunError if steps before those of this optimizer count as well."""
        if self.follows_runs:
            raise refusal(
                "Expected variables that no other private optimizer has trained, got some that one "
                "has: a report of the steps of this one alone would be too small. Compose the "
                "events of both in one accountant, or use HiddenStateCallback, which does."
            )

    @tf.autograph.experimental.do_not_convert  # type: ignore[misc]
    def note(self) -> Mapping[str, Any]:
        """Lets this process know where the current weights come from; the same for a file.

        What is known of the same weights is not given up for less: a run that trained a part of a
        model again has changed what the one before it left, but not the rest.

        Returns:
            Plain types; empty if nothing was trained.
        """
        with tf.init_scope():
            if not self._initial or not self._trainer.has_stepped:
                return {}
            moved = [
                now
                for variable, before in self._initial.values()
                if (now := digest(variable)) != before and _is_telling(variable)
            ]
            origin = self._origin()
            for one in moved:
                if not origin.why or one not in _origins:
                    _origins[one] = origin
            live = _live.get(origin.run_id)
            runs = live.past() if live is not None and live.run is not None else origin.runs
            return {
                "schema": _SCHEMA,
                "weights": moved,
                "run_id": origin.run_id,
                "step": origin.step,
                "why": origin.why,
                "runs": [] if origin.why else [attrs.asdict(past) for past in runs],
            }

    def _origin(self) -> Origin:
        if self.where_from is None:
            return Origin(why="nobody recorded its steps, as HiddenStateCallback does.")
        try:
            if not self._trainer.is_iterate([variable for variable, _ in self._initial.values()]):
                raise refusal("something else has changed the weights since the last step.")
            return self.where_from()
        except (ValueError, TypeError) as error:
            return Origin(why=str(error))


def _digest_or_none(variable: Any) -> str:
    """Of a variable that a traced function creates: nothing, because it has no value yet."""
    try:
        return digest(variable)
    except tf.errors.FailedPreconditionError:
        return ""


@attrs.frozen(kw_only=True)
class RunState:
    """Where a run stands that goes on elsewhere.

    It holds nothing that was measured on the examples, but for `private`, which is there on request
    only; the digests are of weights that count as released, or that stay private.

    Attributes:
        run_id: Names the run, wherever it goes on.
        optimizer: The `Mechanism.kind` of what makes its steps.
        relation: Name of the relation.
        batch_size: b, in records.
        examples: Of an epoch, likewise.
        declared: By the user, about the examples.
        texts: What else is the user's word about the steps so far.
        num_steps: Taken.
        iterations: Keras' count.
        run: The `Run.state_dict` of the steps.
        earlier: The runs that the initial weights come from.
        weights: Digests of the trained variables.
        fixed: Digests of the others.
        blocks: Indices of the trained variables in every block; empty without blocks.
        private: Hidden state of the optimizer; None if it was not asked for.
    """

    run_id: str
    optimizer: str
    relation: str
    batch_size: int
    examples: int
    declared: Declared
    texts: tuple[str, ...]
    num_steps: int
    iterations: int
    run: Mapping[str, Any]
    earlier: tuple[PastRun, ...]
    weights: tuple[str, ...]
    fixed: tuple[str, ...]
    blocks: tuple[tuple[int, ...], ...]
    private: Mapping[str, Any] | None

    @property
    def named_relation(self) -> NeighboringRelation:
        """The relation."""
        return NeighboringRelation[self.relation]

    def check_fits(self, model: Any, optimizer: Any, batch_size: int, examples: int) -> None:
        """Checks that the run can go on with these.

        Args:
            model: It is built.
            optimizer: The mechanism.
            batch_size: Of its batches.
            examples: Of an epoch.

        Raises:
            UnsupportedRunError: The text says what is another one.
        """
        given = self.batch_size, self.examples
        for name, expected, found, remedy in (
            ("optimizer", self.optimizer, optimizer.kind, "Compile with what it was made with"),
            (
                "batches (batch_size, examples)", given, (batch_size, examples),
                "Use the arguments of before",
            ),
        ):  # fmt: skip
            if expected != found:
                raise refusal(
                    f"The state is of another run: expected {name} = {expected}, got {found}. "
                    f"{remedy}."
                )
        if optimizer.hidden_state and self.private is None:
            raise refusal(
                f"Expected a state with {optimizer.hidden_state}, got one without it: with another "
                "one it would not be the run that is accounted. Save it with "
                "include_private_state=True, stays_private=True."
            )
        for name, digests, variables in (
            ("weights that the last recorded step left", self.weights, keras_api.trained(model)),
            ("variables that are not trained as they were", self.fixed, keras_api.fixed(model)),
        ):
            if tuple(map(digest, variables)) != digests:
                raise refusal(
                    f"Expected the {name}, got others. Load the model that was saved together with "
                    "the state."
                )

    def to_plain(self) -> dict[str, Any]:
        """Numbers, strings, lists and dictionaries, for JSON."""
        plain = {field.name: _plain(getattr(self, field.name)) for field in attrs.fields(RunState)}
        return {"schema": _SCHEMA, **plain, "declared": self.declared.to_plain()}

    @classmethod
    def of_plain(cls, plain: Any) -> RunState:
        """Inverse of `to_plain`.

        Raises:
            TypeError, ValueError: It is no such state, or damaged.
        """
        if not isinstance(plain, Mapping):
            raise TypeError(f"Expected the dictionary that state() returned, got {plain!r:.80}.")
        names = {field.name for field in attrs.fields(cls)}
        if plain.get("schema") != _SCHEMA or set(plain) - {"schema"} != names:
            raise ValueError(
                f"Expected the state of a run with schema {_SCHEMA}, got schema "
                f"{plain.get('schema')!r} with the keys {sorted(plain)}."
            )
        try:
            state = cls(
                run_id=str(plain["run_id"]),
                optimizer=str(plain["optimizer"]),
                relation=str(plain["relation"]),
                batch_size=validate.integer("batch_size", plain["batch_size"], minimum=1),
                examples=validate.integer("examples", plain["examples"], minimum=1),
                declared=Declared.of_plain(plain["declared"]),
                texts=tuple(map(str, plain["texts"])),
                num_steps=validate.integer("num_steps", plain["num_steps"], minimum=1),
                iterations=validate.integer("iterations", plain["iterations"], minimum=0),
                run=dict(plain["run"]),
                earlier=tuple(map(PastRun.of_plain, plain["earlier"])),
                weights=tuple(map(str, plain["weights"])),
                fixed=tuple(map(str, plain["fixed"])),
                blocks=tuple(tuple(map(int, block)) for block in plain["blocks"]),
                private=plain["private"],
            )
            run = run_of(state.run)
            run.check_relation(state.named_relation)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"The state is damaged: {error}") from error
        if run.num_steps != state.num_steps:
            raise ValueError(
                f"The state is damaged: {state.num_steps} steps, but {run.num_steps} are recorded."
            )
        return state


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(part) for part in value]
    return attrs.asdict(value) if attrs.has(type(value)) else value
