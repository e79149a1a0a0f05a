"""Event, guarantee, assumptions and statement of a recorded run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from hidden_state_accountants import (
    Assumption,
    Comparison,
    Gain,
    Guarantee,
    UnsupportedRunError,
    compare,
    validate,
    would_gain,
)
from hidden_state_accountants.advice import report_lines
from hidden_state_accountants.bounds.assumptions import OF_EVERY_RUN
from hidden_state_accountants.guarantee import merge_assumptions, replace_assumptions
from hidden_state_accountants.runs.statement import privacy_statement
from hidden_state_adapters.public_numbers import warn_of_delta
from hidden_state_adapters.tf_privacy.record import FOREIGN_LOOP, RecordedRun

_CHECKED = (
    "variables in float32 or float64, {}; variables that are not trained as at the start, whenever "
    "epsilon is asked for"
)
_ONLY_BY_STEPS = "changed by the private optimizer only"
_BETWEEN_EPOCHS = "those that the last step left when an epoch begins and when epsilon is asked for"
_DECLARED = (
    "the preprocessing of an example does not depend on the others",
    "losses and metrics of the training data (History, progress bar) stay private",
)
_NO_MEMORY = (
    "no step reads what was computed from other examples without noise and is kept outside of the "
    "model's variables: a memory of features, centres, running statistics"
)
_EARLIER = (
    "the private runs that the initial weights come from ({}) are composed with this one: "
    "variables, copies of models and files of private models and optimizers tell"
)
_NO_LOSS = (
    "Every step counts, because no loss_geometry is declared. Where one Dense layer is trained, at "
    "the end of the model, make_private(model, feature_norm=) knows it."
)


def _assumptions(record: RecordedRun, of_holder: Iterable[str]) -> tuple[Assumption, ...]:
    """Returns everything that has to be true."""
    algorithm, run = record.optimizer, record.whole_run()
    is_own_loop = record.of_gradients is not None
    checked = [
        record.of_batches,
        _CHECKED.format(_ONLY_BY_STEPS if is_own_loop else _BETWEEN_EPOCHS),
        *algorithm.described.checked(),
    ]
    if record.spent:
        checked.append(_EARLIER.format(len(record.spent)))
    declared = [
        *_DECLARED,
        *([] if is_own_loop else [FOREIGN_LOOP]),
        *algorithm.declared(run.event()),
        *record.texts,
        *([] if record.declared.source else [_NO_MEMORY]),  # else loss and features are known
        *of_holder,
    ]
    own = (
        *map(Assumption.checked, checked),
        *(record.of_gradients or ()),
        *record.declared.measured,
        *OF_EVERY_RUN,
        *map(Assumption.declared, declared),
    )
    # What was read off this run's loss says nothing about the runs before it.
    proven = replace_assumptions(
        run.guarantee(record.relation).assumptions,
        *algorithm.described.derived(),
        *algorithm.in_advance(run),
    )
    return merge_assumptions([own, proven, *(g.assumptions for g in record.spent)])


def _advice(record: RecordedRun, delta: float) -> list[str]:
    """Returns why epsilon is that of composition, where it is, and what would help."""
    events, guarantee = record.events(), record.guarantee()
    if len(events) > 1 or not guarantee.theorem.startswith("composition"):
        return []
    if record.why_not_known:
        why = [f"Every step counts: {record.why_not_known}."]
    elif getattr(events[0], "loss", ...) is None:
        update = record.optimizer.update
        why = [_NO_LOSS if update.is_plain_sgd else f"Every step counts: {update.name} is not SGD."]
    else:  # the batches are what is easiest changed, and seldom the cause
        reasons = guarantee.alternatives
        others = [one for one in reasons if not one[1].startswith("batch order")]
        why = [f"Not used: {name}: {reason}." for name, reason in [*others, *reasons][:1]]
    return [*why, *report_lines(events[0], guarantee.neighboring_relation, delta)]


class PrivacyReport:
    """Event, guarantee and statement of a run, for who holds its record."""

    _record: RecordedRun | None = None
    _how_to_begin = "Pass the callback to fit."
    _target_delta: float | None = None

    def _told_by(self) -> PrivacyReport:
        """Returns the holder of the record."""
        return self

    def _check_can_go_on(self) -> None:
        """Raises UnsupportedRunError where the run could not go on elsewhere."""

    def _declared_texts(self) -> Iterable[str]:
        """Returns the declared assumptions that the holder adds."""
        return ()

    def _recorded(self) -> RecordedRun:
        own = self._told_by()
        if own._record is None:
            raise ValueError(f"Expected at least one step, got none yet. {self._how_to_begin}")
        if not own._record.optimizer.lineage.is_over:  # else another run has trained on
            own._record.check_iterate()
        return own._record

    @property
    def privacy_event(self) -> Any:
        """Event that happened: a `LastIterateDpEvent`, or the one of the optimizer.

        Raises:
            ValueError: No step was taken.
            UnsupportedRunError: Steps were not recorded, the run has ended, or the model is not the
                iterate that was accounted.
        """
        return self.privacy_events[-1]

    @property
    def privacy_events(self) -> tuple[Any, ...]:
        """Events of the private runs that the initial weights come from, and this one's."""
        return self._recorded().events()

    @property
    def guarantee(self) -> Guarantee:
        """Guarantee of all `privacy_events` together, with the model as the last iterate."""
        return attrs.evolve(self._recorded().guarantee(), assumptions=self.assumptions)

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """Everything that has to be true, each checked, declared or public."""
        record = self._recorded()
        record.check()
        return _assumptions(record, self._told_by()._declared_texts())

    def get_epsilon(self, delta: float) -> float:
        """Returns the epsilon of what is released at `delta`; errors as of `privacy_event`."""
        record = self._recorded()
        record.check_iterate()
        warn_of_delta(delta, self.privacy_event.dataset_size)
        return record.guarantee().epsilon(delta)

    def compare(self, delta: float = 1e-5) -> Comparison:
        """Returns a table of every bound, and of dp-accounting's accountants, at delta in [0, 1].

        Raises:
            ValueError, UnsupportedRunError: As `privacy_event`.
        """
        self.get_epsilon(delta)  # checks the iterate
        relation = self._recorded().guarantee().neighboring_relation
        return compare(list(self.privacy_events), delta, relation)

    def would_gain(self, delta: float = 1e-5, *, epochs: int | None = None) -> Gain:
        """Returns whether hiding the iterates gains anything; one epoch is enough to ask for all.

        Args:
            delta: Probability where epsilon is read, in (0, 1).
            epochs: Length of the run, if its settings stay what they were; None for the steps that
                were taken.

        Returns:
            The epsilons of all iterates and of the last one, the noise at equal epsilon, and the
            change that helps most; `print` it.

        Raises:
            TypeError: The run is one of which every step counts.
            ValueError, UnsupportedRunError: As `privacy_event`; or settings change, which says
                nothing of other epochs.
        """
        event = self.privacy_event
        if epochs is not None:
            event = attrs.evolve(event, num_steps=epochs * event.batches_per_epoch)
        return would_gain(event, delta, self._recorded().guarantee().neighboring_relation)

    def release(self) -> None:
        """Marks the current model as released; call it for every model that anybody sees.

        The last one always counts. UnsupportedRunError if it is not the iterate that was accounted.
        """
        own = self._told_by()
        if own._record is not None:
            own._record.check_iterate()
            own._record.release()

    def state(
        self, *, stays_private: bool = False, include_private_state: bool = False
    ) -> dict[str, Any]:
        """Returns what the run needs to go on in another process, as plain types for JSON.

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
        own = self._told_by()
        own._check_can_go_on()
        state = self._recorded().state(
            own._declared_texts(),
            stays_private=stays_private,
            include_private_state=include_private_state,
        )
        return state.to_plain()

    def report(self, delta: float | None = None) -> str:
        """Returns the privacy statement of the run with everything that was checked and declared.

        Args:
            delta: Probability where epsilon is read; None for target_delta.

        Raises:
            ValueError, UnsupportedRunError: As `privacy_event`; or no delta was given.
        """
        delta = self._target_delta if delta is None else delta
        if delta is None:
            raise ValueError("Expected delta, got None. Pass it here or as target_delta.")
        record = self._recorded()
        record.check_iterate()
        algorithm = record.optimizer
        statement = privacy_statement(
            record.events(),
            attrs.evolve(record.guarantee(), assumptions=self.assumptions),
            validate.target_delta(delta),
            microbatch=algorithm.examples_of_record,
            update_rule=algorithm.update.name,
        )
        return "\n".join(filter(None, [statement, *_advice(record, delta), record.note]))

    def __getstate__(self) -> Any:
        raise UnsupportedRunError(
            "The record of a run cannot be copied or pickled: the steps of the copy would be "
            "missing from epsilon. Keep privacy_event.to_dict()."
        )
