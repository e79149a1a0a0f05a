"""The loss of a run of a stock engine, derived from a criterion and watched in every step."""

from __future__ import annotations

from typing import Any

from opacus.grad_sample import AbstractGradSampleHooks

from hidden_state_accountants import Assumption, LossGeometry, UnsupportedRunError
from hidden_state_adapters.opacus import geometry
from hidden_state_adapters.opacus.criteria import as_module, known_criterion
from hidden_state_adapters.opacus.guards.base import Guard, Guards, Piece
from hidden_state_adapters.opacus.guards.criterion import CriterionGuard, LossGradientGuard
from hidden_state_adapters.opacus.guards.forward import ForwardGuard
from hidden_state_adapters.opacus.guards.frozen import FrozenPart
from hidden_state_adapters.opacus.guards.head import FeatureGuard, HeadWatch
from hidden_state_adapters.opacus.guards.independence import IndependenceGuard
from hidden_state_adapters.opacus.guards.untouched import UntouchedGuard


class WatchedLoss:
    """A linear head and a known criterion, and what has to be true of them in every step.

    Args:
        module: The private model.
        criterion: The loss of the training loop.
        feature_norm: Bound on the norm of every record at the head.

    Attributes:
        geometry: The constants of the loss.

    Raises:
        UnsupportedRunError: They are not known.
        TypeError, ValueError: `feature_norm` is not a positive number.
    """

    def __init__(self, module: Any, criterion: Any, feature_norm: float | None):
        if module is None:
            raise UnsupportedRunError(
                "Expected the model that make_private returned, got none: the constants of the "
                "criterion are those of a linear head. Pass module= to declare_run."
            )
        inner = module._module if isinstance(module, AbstractGradSampleHooks) else module
        self._inner, self._criterion = inner, as_module(criterion)
        reduction = getattr(self._criterion, "reduction", "mean")
        self._feature_norm = feature_norm
        self.geometry: LossGeometry = geometry.auto_loss_geometry(
            inner, criterion, feature_norm, reduction
        )
        head = geometry.find_linear_head(inner)
        assert head is not None
        self._head, self._frozen = head, FrozenPart(inner, head)
        self._frozen.check_batch_norm(tuple(inner.named_modules()))
        self._guards = Guards([])
        self._hooks: tuple[Guard, ...] = ()

    def watch(self) -> None:
        """Hangs the guards on model and criterion; `close` undoes it."""
        assert self._feature_norm is not None
        known = known_criterion(self._criterion)
        assert known is not None
        self._frozen.hold(tells=True)
        head = HeadWatch(self._head, is_followed=True)
        forward = ForwardGuard(self._inner, head, frozen=self._frozen)
        independence = IndependenceGuard(self._inner, forward, criterion=self._criterion)
        divides = self._criterion.reduction == "mean"
        # What the loader delivered is not seen here.
        criterion = CriterionGuard(known, forward, head, tuple, divides=divides)
        features = FeatureGuard(float(self._feature_norm), lambda: forward.largest_feature_norm)
        params = [p for p in self._inner.parameters() if p.requires_grad]
        untouched = UntouchedGuard(self._inner, params, forward)
        self._hooks = (forward, independence, untouched, criterion)
        of_gradients = LossGradientGuard(criterion)
        self._guards = Guards([forward, untouched, independence, criterion, features, of_gradients])

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """What is verified at every step, and what is taken on trust about a frozen backbone."""
        return self._guards.assumptions

    def check(self, piece: Piece, loss_reduction: str) -> None:
        """Raises UnsupportedRunError if a whole batch did not go through the criterion as it is."""
        geometry.check_reduction(self._criterion, loss_reduction)
        self._guards.before(piece)
        self._guards.check_values(piece)
        self._guards.used(piece)
        self._guards.after(piece.step)

    def close(self) -> None:
        """Leaves model and criterion as they were."""
        for guard in self._hooks:
            guard.close()
