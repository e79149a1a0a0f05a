"""What an engine says about the runs that it accounts, and what it is told about releases."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import dp_accounting
import torch
from dp_accounting import NeighboringRelation
from opacus import PrivacyEngine
from torch import nn

import hidden_state_accountants as hsa
from hidden_state_accountants import Assumption, Comparison, DiceSgdDpEvent, UnsupportedRunError
from hidden_state_accountants.runs.statement import text_report
from hidden_state_adapters.opacus import report
from hidden_state_adapters.opacus.accountant import MECHANISM, HiddenStateAccountant
from hidden_state_adapters.opacus.dice_statement import dice_assumptions, dice_report
from hidden_state_adapters.opacus.engine_dice import EngineDiceOptimizer
from hidden_state_adapters.opacus.noise_watch import NoiseWatch
from hidden_state_adapters.opacus.optimizer import HiddenStateOptimizer
from hidden_state_adapters.opacus.recorders import Recorder

RunOptimizer = HiddenStateOptimizer | EngineDiceOptimizer


class AccountedEngine(PrivacyEngine):
    """The part of `HiddenStatePrivacyEngine` that answers questions about privacy; see there."""

    def __init__(
        self,
        *,
        neighboring_relation: NeighboringRelation = NeighboringRelation.REPLACE_SPECIAL,
        secure_mode: bool = False,
        accountant: str = MECHANISM,
    ):
        if accountant != MECHANISM:
            raise ValueError(
                f"Expected accountant = {MECHANISM!r}, got {accountant!r}. For another accountant "
                "use opacus.PrivacyEngine."
            )
        super().__init__(accountant=MECHANISM, secure_mode=secure_mode)
        self.accountant = HiddenStateAccountant(neighboring_relation)
        self._noise = NoiseWatch()
        self._token = object()  # stands for this engine where it must not be kept alive
        self._optimizer: RunOptimizer | None = None
        self._modules: tuple[Any, ...] = ()
        self._run_id = ""
        self._fields: dict[str, Any] = {}

    # What was spent

    def get_epsilon(self, delta: float) -> float:
        """The epsilon of all runs at `delta`, if the current iterate is the last one.

        Raises:
            UnsupportedRunError: The model is not the iterate that was accounted, or something was
                looked at that no theorem covers.
        """
        return self.accountant.get_epsilon(delta)

    @property
    def privacy_event(self) -> dp_accounting.DpEvent:
        """The event that happened: a LastIterateDpEvent or DiceSgdDpEvent; several compose.

        Raises:
            ValueError: No step was taken.
            UnsupportedRunError: Something was looked at that no theorem covers, or a step of the
                current run was refused.
        """
        events = [recorder.event() for recorder in self._recorded()]
        return events[0] if len(events) == 1 else dp_accounting.ComposedDpEvent(events)

    def _recorded(self) -> list[Recorder]:
        self.accountant.check_not_refused()
        if self._optimizer is not None:
            self._optimizer.check_not_refused()
        recorded = [r for r in self.accountant.recorders if r.num_steps]
        if not recorded:
            raise ValueError("Expected at least one step, got none yet.")
        return recorded

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """Everything that has to be true, each checked at every step, declared or public."""
        guarantee = self.accountant.guarantee
        if isinstance(self._optimizer, EngineDiceOptimizer):
            return dice_assumptions(guarantee, self._optimizer)
        context = None if self._optimizer is None else self._optimizer.context
        return report.run_assumptions(guarantee, context)

    def report(self, delta: float) -> str:
        """A dozen lines to paste: epsilon, theorem, releases that it covers, run, assumptions.

        Raises:
            ValueError: No step was taken.
            UnsupportedRunError: As `get_epsilon`.
        """
        events = [recorder.event() for recorder in self._recorded()]
        guarantee, assumptions = self.accountant.guarantee, self.assumptions
        if isinstance(events[-1], DiceSgdDpEvent):
            return dice_report(events, guarantee, assumptions, delta, self._update_rule())
        context = None if self._optimizer is None else self._optimizer.context
        return text_report(
            events=events,
            guarantee=guarantee,
            assumptions=assumptions,
            delta=delta,
            projection_radius=None if context is None else context.projection_radius,
        )

    def _update_rule(self) -> str:
        """Of the last run; a checkpoint alone does not say."""
        if isinstance(self._optimizer, EngineDiceOptimizer):
            return type(self._optimizer.original_optimizer).__name__
        return "any"

    def compare(self, delta: float = 1e-5) -> Comparison:
        """What every bound, and dp-accounting's own accountants, say about what happened.

        Args:
            delta: In [0, 1].

        Returns:
            A table with the rows of each run; `print` it.

        Raises:
            ValueError: No step was taken.
            UnsupportedRunError: As `get_epsilon`.
        """
        events = [recorder.event() for recorder in self._recorded()]
        _ = self.accountant.guarantee  # checks the iterate
        return hsa.compare(events, delta, self.accountant.neighboring_relation)

    # What was released or looked at

    def _current(self) -> RunOptimizer:
        if self._optimizer is None:
            raise UnsupportedRunError("Expected a run, got none. Call make_private first.")
        return self._optimizer

    def release(self) -> None:
        """Marks the current iterate as released; call it for every model that anybody sees.

        Every iterate of a DiceSGD run is covered anyway: there it costs nothing.
        A number that is computed from the iterate and PUBLIC data (accuracy on a public test set)
        is covered by the release of the iterate.

        Raises:
            UnsupportedRunError: There is no run, or the model is not the iterate that was
                accounted.
        """
        optimizer = self._current()
        optimizer.check_iterate()
        optimizer.context.recorder.release()

    @contextlib.contextmanager
    def evaluate_on_private_data(self, *, stays_private: bool = False) -> Iterator[None]:
        """For a look at the private records in the middle of training; eval() and no_grad() inside.

        A number that is computed from an iterate AND the private records (training loss, accuracy
        on the training data) is a further query of the records. No theorem here covers it.

        Args:
            stays_private: True says that nobody but you sees the number and that it influences
                nothing: not the number of steps, a schedule, which model is released or whether.
                That becomes a listed assumption. False (also by default): from then on no epsilon
                is given for this engine.

        Raises:
            UnsupportedRunError: There is no run.
        """
        optimizer = self._current()
        if stays_private:
            self.accountant.assume(
                "what was computed from private records in evaluate_on_private_data is shown to "
                "nobody and influences nothing"
            )
        else:
            self.accountant.refuse(
                f"Something computed from the model and the private records was looked at after "
                f"step {optimizer.context.recorder.num_steps}, and no theorem here covers it. Add "
                "noise to it and account it yourself, evaluate on public data (engine.release()), "
                "or use evaluate_on_private_data(stays_private=True) if it stays with you."
            )
        modes = [(part, part.training) for module in self._modules for part in _modules_of(module)]
        try:
            for part, _ in modes:
                part.training = False
            with torch.no_grad():
                yield
        finally:
            for part, mode in modes:
                part.training = mode


def _modules_of(module: Any) -> list[nn.Module]:
    return list(module.modules()) if isinstance(module, nn.Module) else []
