"""What a guard is: one way to get a silently wrong epsilon, and what stops it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import attrs
import torch
from torch import nn

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_adapters.opacus.gradients.figures import Figure, read
from hidden_state_adapters.opacus.gradients.head import HeadGradients
from hidden_state_adapters.opacus.gradients.sums import add_weighted_sums, gradient_norms

_T = TypeVar("_T")


@attrs.define(eq=False)
class Piece:
    """The gradients at hand: of a batch or, under BatchMemoryManager, of a piece of one.

    Attributes:
        step: The number of the logical step that it belongs to, from 1 on.
        params: The parameters whose gradients these are: all, or those of one block.
        block: The number of the block, from 0 on; 0 for an optimizer that has one.
        rows: Per-example gradients.
        gradients: Where they are: with the parameters, or of a head that computed them.
    """

    step: int
    params: Sequence[nn.Parameter]
    block: int = 0
    rows: int = 0
    gradients: HeadGradients | None = None
    _norms: torch.Tensor | None = None

    @property
    def norms(self) -> torch.Tensor:
        """The norms of the gradients before the clip, shape (rows,).

        Computed when they are first asked for, after all guards have seen the piece: what a guard
        computes beside the batch need not find room beside that.
        """
        if self._norms is None:
            own = self.gradients
            self._norms = gradient_norms(self.params) if own is None else own.norms(self.params)
        return self._norms

    def add_sums(self, weights: torch.Tensor, *others: torch.Tensor) -> list[list[torch.Tensor]]:
        """Adds the sums of the gradients, each times its weight, to `summed_grad`.

        Args:
            weights: Shape (rows,), made from the norms.
            *others: Further weights.

        Returns:
            For each of `params` the sums with each of `others`.
        """
        if self.gradients is not None:
            return self.gradients.add_sums(self.params, weights, *others)
        return add_weighted_sums(self.params, weights, *others)

    @property
    def largest_norm(self) -> Figure:
        """The largest of the norms; 0 for no rows."""
        return self.norms.max() if self.rows else 0.0


class Guard:
    """One way to be silently wrong, and what stops it. All methods do nothing unless overridden.

    A step goes through them in this order: `admit`, `before`, `figures`, `judge`, `before_noise`,
    `used`, `moved`, `after`. What `admit` raises leaves the run as it was, because it looks at
    nothing that depends on the records; what a later method raises ends the run.
    """

    def admit(self, step: int) -> None:
        """Raises UnsupportedRunError if there may be no step `step`."""

    def before(self, piece: Piece) -> None:
        """Raises UnsupportedRunError if the piece may not be used; waits for no device."""

    def figures(self, piece: Piece) -> Mapping[str, Figure]:
        """Figures to be read from the device together with those of all other guards."""
        return {}

    def judge(self, piece: Piece, values: Mapping[str, float]) -> None:
        """Raises UnsupportedRunError if the values of the figures (of all guards) are wrong."""

    def before_noise(self, piece: Piece) -> None:
        """Noise is about to be drawn."""

    def used(self, piece: Piece) -> None:
        """The gradients at hand were added up."""

    def moved(self, piece: Piece) -> None:
        """The optimizer moved the parameters of the piece."""

    def after(self, step: int) -> None:
        """The logical step is complete."""

    def resume(self, steps: int) -> None:
        """The run goes on from a checkpoint after `steps` steps."""

    def iterate_figures(self) -> Mapping[str, Figure]:
        """As `figures`, of the model between two steps."""
        return {}

    def judge_iterate(self, steps: int, values: Mapping[str, float]) -> None:
        """Raises UnsupportedRunError unless the model is the iterate after `steps` steps."""

    def close(self) -> None:
        """The run ended: leaves the module and the criterion as they were."""

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """What it verifies at every step, and what it cannot see and takes on trust."""
        return ()


_IN_A_STEP = ("admit", "before", "figures", "judge", "before_noise", "used", "moved", "after")


class Guards:
    """All guards of a run, as one: in their order, with one transfer from the device.

    Args:
        guards: In the order in which they are asked; the first that raises says why.
    """

    def __init__(self, guards: Iterable[Guard]):
        self._guards = tuple(guards)
        self._asked = {name: self._with(name) for name in _IN_A_STEP}

    def _with(self, name: str) -> tuple[Guard, ...]:
        """The guards for which a method does something."""
        nothing = getattr(Guard, name)
        return tuple(guard for guard in self._guards if getattr(type(guard), name) is not nothing)

    def admit(self, step: int) -> None:
        """Asks every guard."""
        for guard in self._asked["admit"]:
            guard.admit(step)

    def before(self, piece: Piece) -> None:
        """Asks every guard."""
        for guard in self._asked["before"]:
            guard.before(piece)

    def check_values(self, piece: Piece) -> dict[str, float]:
        """Reads the figures of all guards in one transfer, lets each judge them, returns them."""
        found: dict[str, Figure] = {}
        for guard in self._asked["figures"]:
            found.update(guard.figures(piece))
        values = read(found)
        for guard in self._asked["judge"]:
            guard.judge(piece, values)
        return values

    def before_noise(self, piece: Piece) -> None:
        """Tells every guard."""
        for guard in self._asked["before_noise"]:
            guard.before_noise(piece)

    def used(self, piece: Piece) -> None:
        """Tells every guard."""
        for guard in self._asked["used"]:
            guard.used(piece)

    def moved(self, piece: Piece) -> None:
        """Tells every guard."""
        for guard in self._asked["moved"]:
            guard.moved(piece)

    def after(self, step: int) -> None:
        """Tells every guard."""
        for guard in self._asked["after"]:
            guard.after(step)

    def resume(self, steps: int) -> None:
        """Tells every guard."""
        for guard in self._guards:
            guard.resume(steps)

    def check_iterate(self, steps: int) -> None:
        """Raises UnsupportedRunError unless the model is what step `steps` left."""
        found: dict[str, Figure] = {}
        for guard in self._guards:
            found.update(guard.iterate_figures())
        values = read(found)
        for guard in self._guards:
            guard.judge_iterate(steps, values)

    def close(self) -> None:
        """Tells every guard."""
        for guard in self._guards:
            guard.close()

    @property
    def assumptions(self) -> tuple[Assumption, ...]:
        """Those of all guards."""
        return tuple(a for guard in self._guards for a in guard.assumptions)


def at_step(step: int, check: Callable[[], _T]) -> _T:
    """Puts the number of the step in front of what `check` raises."""
    try:
        return check()
    except UnsupportedRunError as error:
        raise UnsupportedRunError(f"step {step}: {error}") from None
