"""Declaration of a training run of which only some iterates are released.

>>> import hidden_state_accountants as hsa
>>> event = hsa.LastIterateDpEvent(
...     noise_multiplier=2.0, learning_rate=0.5, clip_norm=1.4143, batch_size=500,
...     dataset_size=50_000, num_steps=20_000, batch_order=hsa.BatchOrder.CYCLIC,
...     loss=hsa.LossGeometry.softmax_cross_entropy(feature_norm=1.0), weight_decay=0.1)
>>> event.batches_per_epoch
100
"""

from __future__ import annotations

import math
from typing import ClassVar

import attrs
import dp_accounting
import numpy as np
from attrs.validators import instance_of, optional
from dp_accounting import NeighboringRelation
from scipy import stats

from hidden_state_accountants import validate
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.batch_order import (
    OF_RANDOM_SIZE,
    BatchOrder,
    DealtEvent,
    parse_batch_order,
    sensitivity_in_clip_norms,
)
from hidden_state_accountants.events.loss_geometry import LossGeometry, LossKind
from hidden_state_accountants.events.schedule import (
    Schedule,
    parse_schedule,
    per_step,
    same_in_all_steps,
    values_and_counts,
)

_SCHEDULED = ("noise_multiplier", "learning_rate", "clip_norm", "weight_decay")


@attrs.frozen(kw_only=True, repr=False)
class LastIterateDpEvent(DealtEvent):
    r"""A run of noisy (projected, decayed) clipped gradient descent that releases its last iterate.

    .. math::
        x_t = \Pi\,\mathrm{prox}_{\eta_t h}\Big( (1 - \eta_t w_t)\, x_{t-1}
              - \frac{\eta_t}{b}\Big(\sum_{i \in B_t} \mathrm{clip}_{C_t}(\nabla f_i(x_{t-1}))
              + \mathcal{N}(0, (z_t C_t)^2 I)\Big) \Big), \qquad t = 1, \dots, T

    Formal guarantees of the mechanism that the event stands for:
      - Released: the iterates after `release_steps` and :math:`x_T`, nothing else (no averages of
        iterates, optimizer state, metrics on the private data).
      - :math:`\Pi, h, \eta_t, z_t, C_t, w_t, T, b` and the released steps are public, fixed in
        advance and the same for neighbouring data sets; :math:`x_0` does not depend on the data.
      - One record is one row, or one microbatch (`is_microbatched`), and is clipped on its own.
        Under a bound on hidden iterates records and targets do not depend on the iterates.

    `noise_multiplier`, `learning_rate`, `clip_norm` and `weight_decay` take a number, a sequence
    with one entry per step, or a `Schedule`.

    Attributes:
        noise_multiplier: z; the standard deviation of the noise on the SUM of the gradients is
            z * clip_norm (z * loss.lipschitz if clip_norm is None). 0 gives epsilon = infinity.
        learning_rate: eta >= 0.
        clip_norm: C > 0, or None if gradients are not clipped; loss.lipschitz is then required.
        batch_size: b, the public constant that the sum is divided by.
        dataset_size: n, the number of records that take part.
        num_steps: T.
        batch_order: A `BatchOrder` or its value.
        loss: What is known about the per-example loss; None leaves ordinary composition only.
        weight_decay: w >= 0, decoupled: it acts outside the clip. learning_rate * w < 1.
        prox_strong_convexity: mu >= 0: the public, convex regulariser h is mu-strongly convex, and
            its proximal map with the step's learning rate acts after the noise. It then shrinks
            distances by 1/(1 + eta mu): mu = 2 lambda for lambda |x|**2. l1, group lasso, a box and
            non-negative weights have mu = 0: such maps do not expand and change no figure.
        domain_diameter: Diameter (twice the radius of a ball) of the convex set that contains x_0
            and on which every iterate is projected.
        release_steps: The steps (1..T-1) after which the iterate is released as well.
        sampling_rate: POISSON and balls in bins only: the probability with which every record joins
            every batch (of balls in bins: one over their number); None is batch_size /
            dataset_size. Loaders round: 60,000 records in batches of 64 make 938 batches, which
            Opacus draws at a rate of 1/938 and divides by int(60,000 / 938) = 63.
        max_batch_size: POISSON and balls in bins only: the loader drops records, uniformly, beyond
            this size. A record can then displace another one, which costs a little extra delta.
        is_microbatched: True if a record is a microbatch: several examples, always the same ones,
            whose mean gradient is clipped as one. Neighbouring data sets differ in one example,
            which makes one record another one and never takes it away: REPLACE_ONE is the only
            relation under which such a run has a guarantee. `loss` is about the mean loss, which is
            no generalized linear one: what a clip leaves of its gradient need not be monotone.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: No run can have these values, or they are almost certainly a mistake
            (learning_rate * weight_decay >= 1).
    """

    tables: ClassVar = {**dict.fromkeys(_SCHEDULED, Schedule), "loss": LossGeometry}

    noise_multiplier: float | Schedule = attrs.field()
    learning_rate: float | Schedule = attrs.field()
    clip_norm: float | Schedule | None = attrs.field()
    batch_size: int = attrs.field(validator=validate.COUNT)
    dataset_size: int = attrs.field(validator=validate.COUNT)
    num_steps: int = attrs.field(validator=validate.COUNT)
    batch_order: BatchOrder = attrs.field(converter=parse_batch_order)
    loss: LossGeometry | None = attrs.field(
        default=None, validator=optional(instance_of(LossGeometry))
    )
    weight_decay: float | Schedule = 0.0
    prox_strong_convexity: float = attrs.field(default=0.0, validator=validate.MAGNITUDE)
    domain_diameter: float = attrs.field(
        default=math.inf, validator=validate.checked(validate.real, above=0, allow_inf=True)
    )
    release_steps: tuple[int, ...] = ()
    sampling_rate: float | None = None
    max_batch_size: int | None = attrs.field(default=None, validator=validate.COUNT)
    is_microbatched: bool = attrs.field(default=False, validator=validate.FLAG)

    def __attrs_post_init__(self) -> None:
        for name in _SCHEDULED:
            if (value := getattr(self, name)) is not None or name != "clip_norm":
                # 1 - learning_rate * weight_decay rounds to 1
                positive, is_small = name == "clip_norm", name == "weight_decay"
                value = parse_schedule(
                    name, value, self.num_steps, positive=positive, is_small=is_small
                )
                object.__setattr__(self, name, value)
        loss = self.loss
        if self.clip_norm is None and (loss is None or loss.lipschitz is None):
            raise ValueError(
                "Expected loss.lipschitz when clip_norm is None, got none. Declare the bound on "
                "the per-example gradient norm, or clip."
            )
        if self.is_microbatched and loss and loss.kind is LossKind.GENERALIZED_LINEAR:
            lipschitz = "" if loss.lipschitz is None else f", lipschitz={loss.lipschitz:g}"
            raise ValueError(
                f"Expected the loss of a microbatch with is_microbatched=True, got {loss!r}: "
                "clipping the mean gradient of several examples may stretch a step. Use "
                f"LossGeometry.convex({loss.smoothness:g}{lipschitz})."
            )
        released = {
            validate.integer("release_steps", step, minimum=1, maximum=self.num_steps)
            for step in self.release_steps
        }
        # The last iterate always is released.
        object.__setattr__(self, "release_steps", tuple(sorted(released - {self.num_steps})))
        self._check_dealing()
        if self.max_batch_size is not None and self.batch_order not in OF_RANDOM_SIZE:
            raise ValueError(
                f"Expected max_batch_size = None for {self.batch_order.name} batches, got "
                f"{self.max_batch_size!r}. Only POISSON batches and balls in bins vary in size."
            )
        steps = self.num_steps if self.has_schedules else 1
        product = per_step(self.learning_rate, steps) * per_step(self.weight_decay, steps)
        if (worst := float(product.max())) >= 1:
            raise ValueError(
                f"Expected learning_rate * weight_decay < 1, got {worst:g}. Lower one of them."
            )

    def unmet_relation(self, relation: NeighboringRelation) -> str | None:
        """The reason why no theorem covers the run under `relation`, or None."""
        if self.is_microbatched and relation is not NeighboringRelation.REPLACE_ONE:
            return (
                "a record of this run is a microbatch of several examples: without one of them, or "
                "with one that has no gradient, it is another record and not none. Use "
                "NeighboringRelation.REPLACE_ONE."
            )
        return super().unmet_relation(relation)

    @property
    def has_schedules(self) -> bool:
        """True if a hyper-parameter changes during the run."""
        return any(isinstance(getattr(self, name), Schedule) for name in _SCHEDULED)

    def one_step_if_constant(self) -> LastIterateDpEvent:
        """The run, or one step of it if all its steps are equal.

        What is asked of every step is asked of this, so that a long run costs no more than a short
        one.
        """
        if self.has_schedules or self.num_steps == 1:
            return self
        return attrs.evolve(self, num_steps=1, release_steps=())

    def per_step(self, name: str) -> np.ndarray:
        """The float64 values of shape (num_steps,) of a scheduled field."""
        return per_step(getattr(self, name), self.num_steps)

    @same_in_all_steps
    def gradient_bound(self) -> np.ndarray:
        """Bound, per step, on the norm of what one record adds to the sum: min(C_t, lipschitz)."""
        lipschitz = None if self.loss is None else self.loss.lipschitz
        if self.clip_norm is None:
            assert lipschitz is not None  # checked at construction
            return per_step(lipschitz, self.num_steps)
        clip = self.per_step("clip_norm")
        return clip if lipschitz is None else np.minimum(clip, lipschitz)

    @same_in_all_steps
    def noise_std_on_sum(self) -> np.ndarray:
        """Standard deviation, per step, of the noise that is added to the sum of the gradients."""
        unit = self.gradient_bound() if self.clip_norm is None else self.per_step("clip_norm")
        return self.per_step("noise_multiplier") * unit

    def as_composition(
        self,
        neighboring_relation: NeighboringRelation | str = NeighboringRelation.REPLACE_SPECIAL,
    ) -> dp_accounting.DpEvent:
        """The same run with every iterate released, as a standard dp-accounting event.

        The sensitivity of the relation is folded into the noise. Evaluate the event with an
        accountant constructed with ADD_OR_REMOVE_ONE, whatever `neighboring_relation` is: stock
        accountants disagree about Gaussian events under REPLACE_ONE. The one exception is
        WITHOUT_REPLACEMENT, which only RdpAccountant under REPLACE_ONE can evaluate.

        For constant parameters the event counts the participations of the worst record. With
        schedules it is a single Gaussian event, which equals the composition of the Gaussian
        mechanisms exactly. Steps with learning rate 0 release nothing new and are left out.

        Args:
            neighboring_relation: The relation that the guarantee is for.

        Raises:
            UnsupportedRunError: No standard event is proven to dominate the run (among them POISSON
                batches with a cap: `LastIterateAccountant` adds its delta).
        """
        order, relation = self.batch_order, validate.neighboring_relation(neighboring_relation)
        unmet = self.unmet_relation(relation) or self.unequal_batches()
        if self.cap_delta(relation) > 0:
            unmet = (
                f"No standard event covers batches that are cut at max_batch_size = "
                f"{self.max_batch_size}: there a record can displace another one."
            )
        elif order is BatchOrder.POISSON and relation is NeighboringRelation.REPLACE_ONE:
            unmet = (
                "No standard event that every dp-accounting version evaluates is proven to "
                "dominate POISSON batches under REPLACE_ONE: use "
                "NeighboringRelation.REPLACE_SPECIAL or ADD_OR_REMOVE_ONE."
            )
        if unmet:
            raise UnsupportedRunError(unmet)
        noise = self._noise_over_sensitivity(relation)
        if order not in (BatchOrder.POISSON, BatchOrder.WITHOUT_REPLACEMENT):
            return self._composed_of_fixed_batches(noise)
        values, counts = values_and_counts(noise)
        steps = [
            dp_accounting.SelfComposedDpEvent(self._sampled(float(value)), int(count))
            for value, count in zip(values, counts, strict=True)
            if np.isfinite(value)
        ]
        if not steps:
            return dp_accounting.NoOpDpEvent()
        return steps[0] if len(steps) == 1 else dp_accounting.ComposedDpEvent(steps)

    def _sampled(self, noise: float) -> dp_accounting.DpEvent:
        """A step whose batch is drawn at random."""
        step = dp_accounting.GaussianDpEvent(noise)
        if self.batch_order is BatchOrder.POISSON:
            return dp_accounting.PoissonSampledDpEvent(self.sampling_probability, step)
        return dp_accounting.SampledWithoutReplacementDpEvent(
            self.dataset_size, self.batch_size, step
        )

    def _composed_of_fixed_batches(self, noise: np.ndarray) -> dp_accounting.DpEvent:
        """The steps that hold one record, which every epoch deals to one of its batches."""
        num_steps, period = self.num_steps, self.batches_per_epoch
        if not self.has_schedules:
            # The worst position is the first one; a record that is reshuffled can have it always.
            if noise[0] == math.inf:
                return dp_accounting.NoOpDpEvent()
            step = dp_accounting.GaussianDpEvent(float(noise[0]))
            return dp_accounting.SelfComposedDpEvent(step, -(-num_steps // period))
        period = min(period, num_steps)
        padded = np.zeros(-(-num_steps // period) * period)
        with np.errstate(divide="ignore"):
            padded[:num_steps] = noise**-2.0
        epochs = padded.reshape(-1, period)
        if self.batch_order in (BatchOrder.RESHUFFLED, BatchOrder.BALLS_IN_BINS_REDRAWN):
            mu_squared = float(epochs.max(axis=1).sum())
        else:
            mu_squared = float(epochs.sum(axis=0).max())
        if mu_squared == 0:
            return dp_accounting.NoOpDpEvent()
        return dp_accounting.GaussianDpEvent(1 / math.sqrt(mu_squared))

    @same_in_all_steps
    def _noise_over_sensitivity(self, relation: NeighboringRelation) -> np.ndarray:
        """Infinite where nothing is released: no learning rate, or a gradient bound of 0."""
        sensitivity = sensitivity_in_clip_norms(self.batch_order, relation) * self.gradient_bound()
        acts = (sensitivity > 0) & (self.per_step("learning_rate") > 0)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(acts, self.noise_std_on_sum() / sensitivity, np.inf)

    def cap_delta(self, relation: NeighboringRelation | str) -> float:
        """The delta that `max_batch_size` costs; 0 without a cap.

        It bounds the probability that the cap ever acts; until then the run is one without a cap.
        """
        if self.max_batch_size is None:
            return 0.0
        return self.overfull_delta(relation, self.max_batch_size)

    def overfull_delta(self, relation: NeighboringRelation | str, most_terms: int) -> float:
        """Bounds the probability that a batch with the record could ever exceed `most_terms`.

        That is, batches * P(Binomial(n - 1, q) >= most_terms), n the size of the larger data set, q
        the rate: of POISSON batches and balls in bins. One draw of the bins has l batches.
        """
        adds = validate.neighboring_relation(relation) is NeighboringRelation.ADD_OR_REMOVE_ONE
        others = self.dataset_size - (not adds)
        tail = stats.binom.sf(most_terms - 1, others, self.sampling_probability)
        batches = self.num_steps
        if self.batch_order is BatchOrder.BALLS_IN_BINS:
            batches = min(batches, self.batches_per_epoch)
        return min(1.0, batches * float(tail))
