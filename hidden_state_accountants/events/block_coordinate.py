"""Declaration of a run of noisy mini-batch block coordinate descent.

>>> import hidden_state_accountants as hsa
>>> event = hsa.BlockCoordinateDpEvent(
...     step_size=0.05, noise_variance=1.0, clip_norm=1.0, batch_size=100,
...     dataset_size=2500, num_epochs=20, prox_strong_convexity=0.5)
>>> event.batches_per_epoch, event.num_steps
(25, 500)
"""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import numpy as np
from attrs.validators import instance_of, optional
from dp_accounting import NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.events.batch_order import (
    BatchOrder,
    DealtEvent,
    sensitivity_in_clip_norms,
)
from hidden_state_accountants.events.loss_geometry import LossGeometry
from hidden_state_accountants.events.schedule import Schedule, parse_schedule, per_step


@attrs.frozen(kw_only=True, repr=False)
class BlockCoordinateDpEvent(DealtEvent):
    r"""A run of DP-MBCD (Chen & Liu 2025, Algorithm 1) that releases its last blocks.

    In epoch k = 0..K-1 and batch j = 0..n/b-1 each of the `num_blocks` released blocks makes

    .. math::
        \theta \leftarrow \mathrm{Prox}_{\eta, r}\Big(\theta
            - \frac{\eta}{b} \sum_{i \in B_j} g_i(\theta) + \mathcal{N}(0, 2\eta\,o(k, j)\, I)\Big)

    where :math:`g_i` is the (per-record clipped) gradient of record i's block objective, hidden
    variables recomputed. How far one record can move their sum follows from the clip
    (`clip_norm`), or is declared (`gradient_sensitivity`): exactly one of the two is given.

    Formal guarantees of the mechanism that the event stands for:
      - Released: the blocks after the last step. Hidden variables are never released.
      - :math:`\eta, o, r, b, K` and the number of blocks are public, fixed in advance and the same
        for neighbouring data sets; the start does not depend on the data.
      - :math:`\eta` is constant: not the paper's step :math:`\min(\kappa/\|\nabla^2 f\|, \eta)`,
        which depends on the parameters and on the data.

    Attributes:
        step_size: eta >= 0.
        noise_variance: o >= 0; the noise on the block has variance 2 * eta * o. A number, o[k, j]
            of shape (num_epochs, batches_per_epoch) as nested sequences or an array, or a
            `Schedule` of the num_epochs * batches_per_epoch steps.
        clip_norm: C > 0, if the gradient of every record for a block is clipped, on its own and as
            one vector, to C. The sensitivity is then that of the relation of the accountant, and
            clipping never acts exactly if block_loss.lipschitz <= C; see `sensitivity`.
        gradient_sensitivity: S_g >= 0, the largest distance of the SUMS of the per-record gradients
            of a block on neighbouring data sets, at equal parameters, under the relation of the
            accountant. For sums that are bounded otherwise than by `clip_norm`. Beside a
            `block_loss.lipschitz` declare no more than what is needed: 2 * lipschitz <= S_g is read
            as "clipping never acts". Where the mean of a batch is clipped as one vector leave
            `block_loss` at None.
        batch_size: b, the public constant that the sum is divided by.
        dataset_size: n.
        num_epochs: K.
        block_loss: The curvature of every per-record block objective as a function of its block,
            before clipping; None if nothing is known.
        prox_strong_convexity: mu_r >= 0 of the regulariser r, whose proximal map then contracts by
            1 / (1 + eta * mu_r).
        update_lipschitz: L_F, a declared Lipschitz constant of the block's update before noise and
            prox, for every data set; None derives one from `block_loss`.
        prox_lipschitz: L_T, a declared Lipschitz constant of the proximal map. Every prox of a
            convex function has 1; the paper also admits 2. The regulariser has to be convex: a
            value above 1 is read as 1, except by the published account.
        num_blocks: p, the number of released blocks.

    Raises:
        TypeError: An argument has the wrong type or shape.
        ValueError: No run can have these values.
    """

    tables: ClassVar = {"noise_variance": Schedule, "block_loss": LossGeometry}
    sampling_rate = None

    step_size: float = attrs.field(validator=validate.MAGNITUDE)
    noise_variance: float | Schedule = attrs.field()
    clip_norm: float | None = attrs.field(default=None, validator=validate.POSITIVE)
    gradient_sensitivity: float | None = attrs.field(default=None, validator=validate.MAGNITUDE)
    batch_size: int = attrs.field(validator=validate.COUNT)
    dataset_size: int = attrs.field(validator=validate.COUNT)
    num_epochs: int = attrs.field(validator=validate.COUNT)
    block_loss: LossGeometry | None = attrs.field(
        default=None, validator=optional(instance_of(LossGeometry))
    )
    prox_strong_convexity: float = attrs.field(default=0.0, validator=validate.MAGNITUDE)
    update_lipschitz: float | None = attrs.field(default=None, validator=validate.MAGNITUDE)
    prox_lipschitz: float = attrs.field(default=1.0, validator=validate.MAGNITUDE)
    num_blocks: int = attrs.field(default=1, validator=validate.COUNT)

    def __attrs_post_init__(self) -> None:
        if (self.clip_norm is None) is (self.gradient_sensitivity is None):
            found = "neither" if self.clip_norm is None else "both"
            raise ValueError(
                "Expected either clip_norm (the gradient of every record is clipped) or "
                f"gradient_sensitivity (a bound of another kind), got {found}."
            )
        self._check_dealing()
        object.__setattr__(self, "noise_variance", self._noise())

    def _noise(self) -> float | Schedule:
        value: Any = self.noise_variance
        if isinstance(value, list | tuple) or (isinstance(value, np.ndarray) and value.ndim):
            shape = (self.num_epochs, self.batches_per_epoch)
            try:
                array = np.asarray(value)
            except ValueError:  # rows of different lengths
                array = np.empty(0, dtype=object)
            if array.shape != shape or array.dtype.kind not in "fiu":
                raise TypeError(
                    f"Expected noise_variance to be a number or real numbers of shape {shape} "
                    f"(epochs, batches), got shape {array.shape} and dtype {array.dtype}."
                )
            value = array.ravel()
        return parse_schedule("noise_variance", value, self.num_steps)

    @property
    def batch_order(self) -> BatchOrder:  # type: ignore[override]
        """Fixed batches in a fixed order."""
        return BatchOrder.FULL if self.batch_size == self.dataset_size else BatchOrder.CYCLIC

    @property
    def num_steps(self) -> int:
        """K * n/b, the number of updates of each block."""
        return self.num_epochs * self.batches_per_epoch

    def sensitivity(self, relation: NeighboringRelation | str) -> float:
        r"""S_g: how far one record moves the sum of the gradients of a block, at equal parameters.

        With `clip_norm` the gradient of a record is no longer than
        :math:`G = \min(C, \mathtt{block\_loss.lipschitz})`. A record that is replaced by one with
        zero gradient, added or removed moves the sum by G; one that is replaced by any other moves
        it by 2 G (REPLACE_ONE, the neighbours of the paper).

        Args:
            relation: The neighbouring relation of the guarantee. A declared `gradient_sensitivity`
                is read as that of this relation.
        """
        relation = validate.neighboring_relation(relation)
        if self.clip_norm is None:
            assert self.gradient_sensitivity is not None  # checked at construction
            return self.gradient_sensitivity
        lipschitz = None if self.block_loss is None else self.block_loss.lipschitz
        bound = self.clip_norm if lipschitz is None else min(self.clip_norm, lipschitz)
        return sensitivity_in_clip_norms(BatchOrder.CYCLIC, relation) * bound

    @property
    def clipping_may_act(self) -> bool:
        """False only if `block_loss` says that no gradient is longer than the clip norm."""
        if self.block_loss is None or self.block_loss.lipschitz is None:
            return True
        if self.clip_norm is not None:
            return self.block_loss.lipschitz > self.clip_norm
        assert self.gradient_sensitivity is not None  # checked at construction
        # A clip at C gives S_g = C or 2 C: the larger factor leaves the smaller clip norm.
        return 2 * self.block_loss.lipschitz > self.gradient_sensitivity

    def noise_variances(self) -> np.ndarray:
        """o[k, j]: float64 of shape (num_epochs, batches_per_epoch)."""
        flat = per_step(self.noise_variance, self.num_steps)
        return flat.reshape(self.num_epochs, self.batches_per_epoch)
