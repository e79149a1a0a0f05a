"""What a callback and a model tell of the run that they hold."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from dp_accounting import DpEvent

from hidden_state_accountants import (
    Assumption,
    Comparison,
    Guarantee,
    UnsupportedRunError,
    compare,
    validate,
)
from hidden_state_adapters.advice import advice
from hidden_state_adapters.tf_privacy.recorded_run import RecordedRun


def _advice(events: Sequence[DpEvent], guarantee: Guarantee, delta: float) -> list[str]:
    """Where epsilon is that of composition: why no smaller bound holds, and what would help."""
    if len(events) > 1 or not guarantee.theorem.startswith("composition"):
        return []
    unused = [f"Not used: {name}: {reason}." for name, reason in guarantee.alternatives[:1]]
    helps = advice(events[0], guarantee.neighboring_relation, delta, "l2_norm_clip")
    return [textwrap.fill(line[:1].upper() + line[1:], 80) for line in [*unused, *helps]]


class Figures:
    """Event, guarantee and statement of a `RecordedRun`; a base beside the holder's own."""

    _record: RecordedRun | None = None
    _how_to_begin = "Pass the callback to fit."
    _target_delta: float | None = None

    @property
    def _told_by(self) -> Figures:
        """Who holds the record."""
        return self

    def _check_can_go_on(self) -> None:
        """Raises UnsupportedRunError where the run could not go on elsewhere."""

    def _catch_up(self) -> None:
        """What the holder does first, whenever it is asked."""

    def _look_again(self) -> None:
        """Raises UnsupportedRunError if examples are not differentiated alone any more."""

    def _declared_texts(self) -> Iterable[str]:
        """What the holder adds to the assumptions that are the user's word."""
        return ()

    def _recorded(self) -> RecordedRun:
        own = self._told_by
        own._catch_up()
        if own._record is None:
            raise ValueError(f"Expected at least one step, got none yet. {self._how_to_begin}")
        own._record.check_told()
        own._look_again()
        return own._record

    @property
    def privacy_event(self) -> Any:
        """The event that happened: a `LastIterateDpEvent`, or the one of the optimizer.

        Raises:
            ValueError: No step was taken.
            UnsupportedRunError: Steps were taken that are not recorded, the run has ended, or the
                model is neither the last iterate nor what another private optimizer made of it.
        """
        return self._recorded().event()

    @property
    def privacy_events(self) -> tuple[Any, ...]:
        """The events of the private runs that the initial weights come from, and this one's.

        Raises:
            ValueError, UnsupportedRunError: As `privacy_event`.
        """
        return self._recorded().events()

    @property
    def guarantee(self) -> Guarantee:
        """The guarantee of what is released, with the current model as the last iterate.

        It is that of all `privacy_events` together, as are the figures that follow.
        """
        return self._recorded().guarantee()

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """Everything that has to be true, each checked, declared or public."""
        return self._recorded().assumptions(self._told_by._declared_texts())

    def get_epsilon(self, delta: float) -> float:
        """The epsilon of what is released at `delta`, if the model is the last iterate.

        Raises:
            ValueError: No step was taken.
            UnsupportedRunError: The model is not the iterate that was accounted.
        """
        record = self._recorded()
        record.check_iterate()
        return record.guarantee().epsilon(delta)

    def compare(self, delta: float = 1e-5) -> Comparison:
        """What every bound, and dp-accounting's own accountants, say about what happened.

        Args:
            delta: In [0, 1].

        Returns:
            A table with the rows of each run; `print` it.

        Raises:
            ValueError, UnsupportedRunError: As `get_epsilon`.
        """
        self.get_epsilon(delta)  # checks the iterate
        relation = self.guarantee.neighboring_relation
        return compare(list(self.privacy_events), delta, relation)

    def release(self) -> None:
        """Marks the current model as released; call it for every model that anybody sees.

        The last one always counts.

        Raises:
            UnsupportedRunError: The model is not the iterate that was accounted.
        """
        if self._told_by._record is not None:
            record = self._recorded()
            record.check_iterate()
            record.release()

    def state(
        self, *, stays_private: bool = False, include_private_state: bool = False
    ) -> dict[str, Any]:
        """What the run needs to go on in another process, as plain types for JSON.

        Save the model at the same moment. There, load it, construct or load the optimizer as
        before, and call `resume`: it is then one run. The noise of the other process is new.

        It holds nothing that was measured on the examples, unless `include_private_state`.

        Args:
            stays_private: False counts the current weights as released. True says that nobody else
                ever sees this state and the weights saved with it, which is then an assumption.
            include_private_state: Also the error of a DiceSGD run, which is data of the examples
                without noise, and the secret order of a "shuffled_once" run: they cannot go on
                without it. Needs stays_private=True. Other orders are drawn anew.

        Raises:
            ValueError: No step was taken; or the private state would be released.
            UnsupportedRunError: The model is not the iterate that was accounted, or the run cannot
                go on without the private state.
        """
        if include_private_state and not stays_private:
            raise ValueError(
                "Expected stays_private = True with include_private_state = True, got False: the "
                "guarantee rests on nobody knowing the error of DiceSGD."
            )
        self._told_by._check_can_go_on()
        state = self._recorded().state(
            self._told_by._declared_texts(),
            stays_private=stays_private,
            include_private_state=include_private_state,
        )
        return state.to_plain()

    def report(self, delta: float | None = None) -> str:
        """The privacy statement of the run with everything that was checked and declared.

        Args:
            delta: Where epsilon is read; None for the callback's target_delta.

        Raises:
            ValueError: No step was taken, or no delta was given.
            UnsupportedRunError: The model is not the iterate that was accounted.
        """
        delta = self._target_delta if delta is None else delta
        if delta is None:
            raise ValueError("Expected delta, got None. Pass it here or as target_delta.")
        record = self._recorded()
        record.check_iterate()
        text = record.statement(validate.target_delta(delta), self._told_by._declared_texts())
        return "\n".join([text, *_advice(record.events(), record.guarantee(), delta)])

    def __getstate__(self) -> Any:
        raise UnsupportedRunError(
            "The record of a run cannot be copied or pickled: the steps of the copy would be "
            "missing from epsilon. Keep "
            "privacy_event.to_dict()."
        )
