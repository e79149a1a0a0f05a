"""What an optimizer trains: the runs behind its variables, and what it tells whoever is next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import tensorflow as tf

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.tf_privacy.lineage import (
    Origin,
    PastRun,
    digest,
    is_telling,
    merged,
    origin_of,
    remember,
    runs_of,
    to_plain,
)
from hidden_state_adapters.tf_privacy.refusals import refusal

_ATTRIBUTE = "_hidden_state_training"  # of a variable: the last optimizer that trained it


class Trainer(Protocol):
    """What is asked of an optimizer."""

    @property
    def has_stepped(self) -> bool:
        """Whether it took a step."""

    def is_iterate(self, variables: Sequence[Any]) -> bool:
        """Whether the variables are as its last step left them."""


class Training:
    """The variables of one optimizer; they refer to it as long as no other one trains them.

    Attributes:
        follows_runs: Whether the weights come from earlier private runs, so that an account of this
            optimizer alone is too small.
        where_from: Says what the steps so far have left; set by the record of a run, None without.

    Args:
        trainer: The optimizer.
    """

    def __init__(self, trainer: Trainer):
        self._trainer = trainer
        self._variables: list[Any] = []
        self._initial: list[str] = []  # their digests before the first step
        self.follows_runs = False
        self.where_from: Callable[[], Origin] | None = None

    def begin(self, variables: Sequence[Any]) -> None:
        """Notes that noisy gradients for these variables are made, before they move."""
        new = [v for v in variables if getattr(v, _ATTRIBUTE, None) is not self]
        if new:
            with tf.init_scope():  # the step may be traced
                self._begin(new)

    def _begin(self, new: Sequence[Any]) -> None:
        if self.where_from is None:  # else the record has asked
            try:
                self.follows_runs |= bool(self.past_runs(new))
            except UnsupportedRunError:
                self.follows_runs = True
        for variable in new:
            setattr(variable, _ATTRIBUTE, self)
            if not any(variable is own for own in self._variables):
                self._variables.append(variable)
                self._initial.append(_digest_or_none(variable))

    def resume(self, variables: Sequence[Any]) -> None:
        """Goes on with variables that the steps of another optimizer have trained."""
        for variable in variables:
            setattr(variable, _ATTRIBUTE, self)
        self._variables, self._initial = list(variables), [""] * len(variables)

    @property
    def is_over(self) -> bool:
        """Whether another private optimizer has trained the variables since."""
        others = {
            id(one): one for v in self._variables if (one := getattr(v, _ATTRIBUTE)) is not self
        }
        return any(other._trainer.has_stepped for other in others.values())

    def past_runs(self, variables: Iterable[Any]) -> tuple[PastRun, ...]:
        """The private runs that the weights come from, each once; they count as released.

        Raises:
            UnsupportedRunError: They come from a run whose event is not known, or from something
                that was made of the weights of a run.
        """
        variables = list(variables)
        others = [getattr(variable, _ATTRIBUTE, None) for variable in variables]
        for other in {id(one): one for one in others if one is not None}.values():
            other.note()
        runs: list[PastRun] = []
        for variable, other in zip(variables, others, strict=True):
            origin = origin_of(variable)
            if origin is not None:
                runs += runs_of(origin, variable.name)
            elif other is not None and other._has_moved(variable):
                raise refusal(
                    f"Expected initial weights whose privacy is known, got {variable.name}, which "
                    "a private optimizer trained and something else changed since. Start from what "
                    "the run left, or from a new model (that its weights do not depend on the "
                    "examples is then your word)."
                )
        return merged(runs)

    def _has_moved(self, variable: Any) -> bool:
        if not self._trainer.has_stepped:
            return False
        index = next(i for i, own in enumerate(self._variables) if own is variable)
        return digest(variable) != self._initial[index]

    def refuse_earlier_runs(self) -> None:
        """Raises UnsupportedRunError if steps before those of this optimizer count as well."""
        if self.follows_runs:
            raise refusal(
                "Expected variables that no other private optimizer has trained, got some that one "
                "has: a report of the steps of this one alone would be too small. Compose the "
                "events of both in one accountant, or use HiddenStateCallback, which does."
            )

    # What is told

    def note(self) -> Mapping[str, Any]:
        """Lets this process know where the current weights come from; the same for a file.

        Returns:
            Plain types; empty if nothing was trained.
        """
        with tf.init_scope():
            return self._note()

    def _note(self) -> Mapping[str, Any]:
        if not self._variables or not self._trainer.has_stepped:
            return {}
        now = [digest(variable) for variable in self._variables]  # := is not in AutoGraph
        moved = [
            found
            for found, variable, initial in zip(now, self._variables, self._initial, strict=True)
            if found != initial and is_telling(variable)
        ]
        origin = self._origin()
        remember(moved, origin)
        return to_plain(moved, origin)

    def _origin(self) -> Origin:
        if self.where_from is None:
            return Origin(why="nobody recorded its steps, as HiddenStateCallback does.")
        try:
            if not self._trainer.is_iterate(self._variables):
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
