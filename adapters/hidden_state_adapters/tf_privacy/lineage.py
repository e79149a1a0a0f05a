"""Lineage of weights: the private runs behind them, which hang on variables, layers and files.

A run that begins with weights that another private run left shows more of the examples than its own
event says. The variables that a run trains refer to it; copies of layers and models, pickles, and
what a model or an optimizer writes into its configuration hold the runs as plain types. Weights
that are copied as numbers hold none, nor do checkpoints of TensorFlow and files that were written
without an optimizer: that is declared by you.
"""

from __future__ import annotations

import functools
import hashlib
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import tensorflow as tf
from dp_accounting import NeighboringRelation

from hidden_state_accountants import UnsupportedRunError, validate
from hidden_state_accountants.runs.run import Run, run_of
from hidden_state_adapters.tf_privacy import keras_api

_BEHIND = "_hidden_state_runs"  # attribute of variables, layers and models
_RUNS, _WEIGHTS = "runs_behind_the_weights", "weights"  # in the configuration of an optimizer
_NOT_RECORDED = "nobody recorded its steps, as HiddenStateCallback does."
# The last ones are what functions that write an .h5 or a SavedModel ask a model for.
_WRITES = ("save", "save_weights", "export", "get_config", "_trackable_children")
_OF_LAYERS = ("save_own_variables", "get_config", "_trackable_children")
_newest: dict[str, Lineage] = {}  # by the names of runs: who goes on with each in this process
_read: dict[str, tuple[PastRun, ...]] = {}  # runs behind weights of files, by their fingerprints


@attrs.frozen
class PastRun:
    """A run behind weights, as it was when they were copied or written.

    Attributes:
        run_id: Name of the run, wherever it goes on.
        state: `Run.state_dict` of its steps; empty if they are not known.
        refused: Reason why what the weights show is not known; "" if it is.
    """

    run_id: str
    state: Mapping[str, Any]
    refused: str = ""

    @property
    def num_steps(self) -> int:
        """Number of its steps."""
        return int(self.state.get("num_steps", 0))

    @property
    def releases(self) -> Sequence[int]:
        """Steps whose weights were released."""
        return list(self.state.get("release_steps", ()))

    def run(self) -> Run:
        """Returns the run with its steps; ValueError if the state is damaged."""
        return run_of(self.state)

    def counted(self) -> PastRun:
        """Returns the run as this process knows it, with the weights counted as released."""
        newest = _newest.get(self.run_id)
        known = self if newest is None or newest.run is None else newest.snapshot()
        why = known.refused or self.refused
        if newest is not None and newest.whole is not None:
            why = "the fit that trained it is not over."
        if why:
            raise UnsupportedRunError(
                f"Expected initial weights whose privacy is known, got some that a private run "
                f"trained: {why} Start from other weights (that they do not depend on the examples "
                "is then declared by you)."
            )
        if newest is None or known is self:
            return self
        if self.num_steps == known.num_steps:
            newest.release()
        elif self.num_steps not in known.releases:
            raise UnsupportedRunError(
                f"Expected the newest weights of a private run, got those that step "
                f"{self.num_steps} left: the run went on to step {known.num_steps}, and the "
                "weights in between count as hidden. Start from the newest ones."
            )
        return newest.snapshot()  # with the release


def _each_once(runs: Iterable[PastRun]) -> tuple[PastRun, ...]:
    """Returns the runs, each as far as its latest weights go, if it released the earlier ones."""
    runs = list(runs)
    order = sorted(runs, key=lambda past: (bool(past.refused), past.num_steps, len(past.releases)))
    latest = {past.run_id: past for past in order}
    for past in runs:
        last = latest[past.run_id]
        if not last.refused and past.num_steps not in (last.num_steps, *last.releases):
            why = "they are those of different steps of it, not all of them released."
            latest[past.run_id] = attrs.evolve(last, refused=why)
    return tuple(latest[name] for name in dict.fromkeys(past.run_id for past in runs))


class Lineage:
    """The run that trains some variables, and those before it; the variables refer to it.

    Attributes:
        run_id: Name of the run, wherever it goes on.
        earlier: Runs that the initial weights come from.
        run: Steps of the run; None before the first one.
        steps: Number of steps of the optimizer that were recorded, here or in a state.
        released: Last of them whose weights were released.
        ended: Reason why the run has no epsilon any more; "" as long as it has one.
        whole: Function that gives the run with all steps that could follow, while the weights may
            choose how many do, or which are kept; None elsewhere.
        writes: Weak reference to what is called before weights are written to a file.

    Args:
        trainer: `Algorithm` that makes its steps.
    """

    def __init__(self, trainer: Any):
        self._trainer = trainer
        # By the ids of variables: their initial values, and what they referred to before.
        self._before: dict[int, tuple[np.ndarray | None, Any]] = {}
        self.run_id = secrets.token_hex(16)
        self.earlier: tuple[PastRun, ...] = ()
        self.run: Run | None = None
        self.steps = self.released = 0
        self.ended = _NOT_RECORDED
        self.whole: Callable[[], Run] | None = None
        self.writes: Callable[[], Callable[[], None] | None] = lambda: None

    def begin(self, earlier: tuple[PastRun, ...], run_id: str | None = None) -> None:
        """Notes that the run is recorded, after earlier ones; with a name it goes on."""
        self.run_id, self.earlier, self.ended = run_id or self.run_id, earlier, ""
        _newest[self.run_id] = self

    @property
    def is_newest(self) -> bool:
        """True if nobody else in this process goes on with the run."""
        return _newest.get(self.run_id, self) is self

    @tf.autograph.experimental.do_not_convert  # type: ignore[misc]
    def hang_on(
        self, variables: Sequence[Any], model: Any = None, *, resumed: bool = False
    ) -> None:
        """Lets variables that are to be trained, and layers that own some, refer to the run.

        What writes files of the layers, or copies them, then says so first.
        """
        new = [variable for variable in variables if _held(variable) is not self]
        with tf.init_scope():  # the step may be traced
            if new and self.ended == _NOT_RECORDED:
                self.earlier = _each_once((*self.earlier, *_behind(new)))
            for variable in new:
                value = None if resumed else _value_or_none(variable)
                self._before.setdefault(id(variable), (value, _held(variable)))
                setattr(variable, _BEHIND, self)
        own = None if resumed else variables
        for part in [] if model is None else keras_api.parts_of(model, own):
            vars(part)[_BEHIND] = self  # past Keras' bookkeeping
            _watch(part)

    @property
    def is_over(self) -> bool:
        """True if another private run has trained the variables since."""
        held = map(_held, self._trainer.variables)
        return any(one is not self and one._trainer.has_stepped for one in held)

    def snapshot(self) -> PastRun:
        """Returns the run as it is now."""
        run, why = self.run if self.whole is None else self.whole(), self.ended
        if not why and self._trainer.last_step.steps != self.steps:
            why = "it took steps that are not recorded."
        return PastRun(self.run_id, {} if run is None else run.state_dict(), why)

    def release(self) -> None:
        """Counts the current weights as released."""
        if self.run is not None:
            self.run.release()
            self.released = self.steps

    def behind(self, variable: Any) -> tuple[PastRun, ...]:
        """Returns the runs behind a variable that this one trains or has trained."""
        value, held = self._before[id(variable)]
        if not self._trainer.has_stepped:  # the run before may have trained it since
            return (*self.earlier, *(() if held is None else held.behind(variable)))
        if value is not None and np.array_equal(value, variable.numpy()):
            return self.earlier
        past = self.snapshot()
        if not past.refused and not self._trainer.has_left(variable):
            past = attrs.evolve(past, refused="something else has changed the weights since.")
        return (*self.earlier, past)

    def before(self, variable: Any) -> Lineage | None:
        """Returns whose variable it was, and still is until this one takes a step."""
        held: Lineage | None = self._before[id(variable)][1]
        return None if self._trainer.has_stepped else held

    def check_newest(self, continued: Continued) -> None:
        """Raises UnsupportedRunError if steps after a state would be forgotten."""
        steps = continued.state.num_steps
        other = _newest.get(continued.state.run_id, self)
        last = other.released if continued.discard_later_steps else other.steps
        if last > steps:
            raise UnsupportedRunError(
                f"Expected the newest state of the run, got that of step {steps}: {other.steps} "
                f"steps were taken, and step {other.released} was released. Go on from there, or, "
                "if nobody ever saw later ones, say discard_later_steps=True."
            )

    def __reduce__(self) -> Any:
        """Copies and pickles what the runs are at this moment; a copy trains nothing."""
        return tuple, (_behind(self._trainer.variables),)


def _held(part: Any) -> Any:
    return getattr(part, _BEHIND, None)


def _value_or_none(variable: Any) -> np.ndarray | None:
    """Returns a copy of a value; None for a variable that a traced function creates."""
    try:
        return np.array(variable.numpy())
    except tf.errors.FailedPreconditionError:
        return None


# Models, copies and files


def _behind(variables: Iterable[Any], layers: Iterable[Any] = ()) -> tuple[PastRun, ...]:
    """Returns the runs behind the weights in variables, and those that layers were loaded with."""
    runs: list[PastRun] = []
    for held in (vars(layer).get(_BEHIND) for layer in layers):
        runs += held if isinstance(held, tuple) else ()  # of the others their variables tell
    for variable in variables:
        if (held := _held(variable)) is not None:
            runs += held.behind(variable)
        elif _read and _value_or_none(variable) is not None:
            runs += _read.get(fingerprint([variable]), ())
    return _each_once(runs)


def behind_model(model: Any) -> tuple[PastRun, ...]:
    """Returns the runs behind the weights of a model, which need not be built."""
    variables = keras_api.variables(model) if keras_api.is_built(model) else ()
    return _behind(variables, model._flatten_layers())


def runs_behind(model: Any) -> tuple[PastRun, ...]:
    """Returns the private runs that the weights of a model come from; they count as released."""
    loaded = getattr(getattr(model, "optimizer", None), "loaded_runs", {}).get(_RUNS, ())
    return tuple(past.counted() for past in _each_once((*behind_model(model), *past_runs(loaded))))


def hang_loaded(model: Any, runs: tuple[PastRun, ...]) -> Any:
    """Lets the layers of a model that was copied or loaded hold runs; returns the model."""
    for layer in model._flatten_layers() if runs else ():
        vars(layer)[_BEHIND] = runs
    return model


def notes_of(variables: Sequence[Any], loaded: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what an optimizer writes of the runs behind variables, and of those it was read with.

    Empty where there are none.
    """
    runs = _each_once((*past_runs(loaded.get(_RUNS, ())), *_behind(variables)))
    names = [*loaded.get(_WEIGHTS, ()), *(fingerprint([variable]) for variable in variables)]
    plain = [attrs.asdict(past) for past in runs]
    return {_RUNS: plain, _WEIGHTS: list(dict.fromkeys(names))} if runs else {}


def read_notes(config: dict[str, Any]) -> dict[str, Any]:
    """Takes what `notes_of` returned out of a configuration, and remembers and returns it."""
    notes = {name: config.pop(name) for name in (_RUNS, _WEIGHTS) if name in config}
    for name in notes.get(_WEIGHTS, ()):  # whatever the model is compiled with next
        _remember(name, past_runs(notes[_RUNS]))
    return notes


def _remember(name: str, runs: tuple[PastRun, ...]) -> None:
    _read[name] = _each_once((*_read.get(name, ()), *runs))


def _watch(part: Any) -> None:
    own, kind = vars(part), type(part)
    names: tuple[str, ...] = _OF_LAYERS
    if isinstance(part, tf.keras.Model):
        names, own["__reduce_ex__"] = _WRITES, functools.partial(_reduced, part)
        own["__deepcopy__"] = functools.partial(_copied, part)
    for name in names:
        if (write := getattr(kind, name, None)) is not None:
            own[name] = functools.partial(_written, write, part)
            functools.update_wrapper(own[name], write)  # with what Keras notes on it


def _written(write: Callable[..., Any], part: Any, *args: Any, **kwargs: Any) -> Any:
    """Counts a release, and notes the runs where the file or the copy has no other place."""
    is_checkpoint = write.__name__ == "_trackable_children" and "savedmodel" not in (
        *args, kwargs.get("save_type")
    )  # fmt: skip
    optimizer: Any = getattr(part, "optimizer", None)
    for held in [] if is_checkpoint else _trainers(keras_api.variables(part)):
        if (say := held.writes()) is not None:
            say()
    if write.__name__ == "save_own_variables":
        for variable in keras_api.variables(part):
            if runs := _behind([variable], [part]):
                _remember(fingerprint([variable]), runs)
    if hasattr(optimizer, "loaded_runs") and not optimizer.last_step.steps:  # else it tells itself
        optimizer.loaded_runs = notes_of(keras_api.variables(part), optimizer.loaded_runs)
    return write(part, *args, **kwargs)


def _trainers(variables: Iterable[Any]) -> Iterable[Lineage]:
    """Returns the runs that may train some of the variables: several before their first step."""
    found: dict[int, Lineage] = {}
    for variable in variables:
        held = _held(variable)
        while held is not None:
            found[id(held)] = held
            held = held.before(variable)
    return found.values()


def _reduced(part: Any, protocol: Any) -> Any:
    make, arguments, *_ = _written(type(part).__reduce_ex__, part, protocol)
    return _made_again, (make, arguments, behind_model(part))


def _copied(part: Any, memo: Any) -> Any:
    make, arguments = _reduced(part, 4)
    return make(*arguments)


def _made_again(make: Callable[..., Any], arguments: Any, runs: tuple[PastRun, ...]) -> Any:
    return hang_loaded(make(*arguments), runs)


def fingerprint(variables: Sequence[Any]) -> str:
    """Returns a name for the values of variables, bit by bit; the same in every process."""
    found = hashlib.sha256()
    for variable in variables:
        value = np.ascontiguousarray(variable.numpy())
        found.update(f"{value.dtype.str} {value.shape} ".encode() + value.tobytes())
    return found.hexdigest()


# A run that goes on elsewhere


def past_runs(given: Iterable[Any]) -> tuple[PastRun, ...]:
    """Returns runs of plain types as objects; TypeError if they are damaged."""
    return tuple(past if isinstance(past, PastRun) else PastRun(**past) for past in given)


def _blocks(given: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, given))


@attrs.frozen(kw_only=True)
class RunState:
    """State of a run that goes on elsewhere.

    It holds nothing that was measured on the examples, but for `private`, which is there on request
    only; the fingerprint is that of weights that count as released, or that stay private.

    Attributes:
        run_id: Name of the run, wherever it goes on.
        optimizer: `Algorithm.kind` of what makes its steps.
        relation: Neighboring relation.
        batch_size: Batch size b, in records.
        examples: Records of an epoch.
        texts: Declarations about the steps so far.
        num_steps: Number of steps taken.
        iterations: Count of Keras.
        run: `Run.state_dict` of the steps.
        earlier: Runs that the initial weights come from.
        weights: Fingerprint of the variables, saved with the state.
        blocks: Indices of the trained variables in every block; empty without blocks.
        private: Hidden state of the optimizer; None if it was not asked for.
    """

    run_id: str
    optimizer: str
    relation: NeighboringRelation = attrs.field(converter=validate.neighboring_relation)
    batch_size: int
    examples: int
    texts: Sequence[str]
    num_steps: int
    iterations: int
    run: Mapping[str, Any]
    earlier: tuple[PastRun, ...] = attrs.field(converter=past_runs)
    weights: str
    blocks: tuple[tuple[int, ...], ...] = attrs.field(converter=_blocks)
    private: Mapping[str, Any] | None

    def __attrs_post_init__(self) -> None:
        run = run_of(self.run)
        run.check_relation(self.relation)
        if run.num_steps != self.num_steps:
            raise ValueError(f"{self.num_steps} steps, but {run.num_steps} are recorded.")

    def check_fits(self, model: Any, optimizer: Any, relation: NeighboringRelation) -> None:
        """Raises UnsupportedRunError if the run cannot go on with a model and an algorithm."""
        plan = optimizer.plan
        for name, expected, found in (
            ("optimizer", self.optimizer, optimizer.kind),
            ("neighboring_relation", self.relation.name, relation.name),
            ("batch_size", self.batch_size, plan.batch_size),
            ("examples", self.examples, plan.dataset_size),
        ):
            if expected != found:
                raise UnsupportedRunError(
                    f"Expected {name} = {expected} of the run so far, got {found}. Make and "
                    "compile the model as before."
                )
        if optimizer.hidden_state and self.private is None:
            raise UnsupportedRunError(
                f"Expected a state with {optimizer.hidden_state}, got one without it: with another "
                "one it would not be the run that is accounted. Save it with "
                "include_private_state=True, stays_private=True."
            )
        if fingerprint(keras_api.variables(model)) != self.weights:
            raise UnsupportedRunError(
                "Expected the weights that the last recorded step left, got others. Load the model "
                "that was saved together with the state."
            )

    def to_plain(self) -> dict[str, Any]:
        """Returns numbers, strings, lists and dictionaries, for JSON."""
        return {**attrs.asdict(self), "relation": self.relation.name}

    @classmethod
    def of_plain(cls, plain: Any) -> RunState:
        """Returns the inverse of `to_plain`; TypeError or ValueError if it is damaged."""
        if not isinstance(plain, Mapping):
            raise TypeError(f"Expected the dictionary that state() returned, got {plain!r:.80}.")
        try:
            return cls(**plain)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"The state is damaged: {error}") from error


@attrs.frozen
class Continued:
    """A run that goes on.

    Attributes:
        state: State that it stood at.
        discard_later_steps: True if nothing of the steps after the state was ever seen.
    """

    state: RunState
    discard_later_steps: bool
