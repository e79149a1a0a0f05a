"""Private algorithms: what each may be run with, the run that it makes, and what has to be true.

An adapter runs an algorithm in its framework. What follows from its numbers is the same in all of
them, and is here once.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
from dp_accounting import NeighboringRelation

from hidden_state_accountants.advice import no_contraction_line
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.batch_order import BatchOrder
from hidden_state_accountants.events.loss_geometry import LossGeometry
from hidden_state_accountants.guarantee import Assumption, Topic
from hidden_state_accountants.runs.run import (
    BlockCoordinateRun,
    DiceSgdRun,
    LastIterateRun,
    Run,
    Step,
)

Batches = Mapping[str, Any]
"""Fields of an event that say how its records are dealt, by name."""

EVERY_FEATURE = Assumption.declared(
    "the features of every example that the data could hold are as short as those that it holds: "
    "they are scaled example by example, by a rule that does not depend on the data"
)


@attrs.frozen(kw_only=True)
class Algorithm(abc.ABC):
    """A private algorithm with the numbers that it is run with.

    Attributes:
        noise_multiplier: Standard deviation z of the noise on the sum of gradients over C.
        clip_norm: Clip norm C of the gradient of a record.
        source: What a bound on the gradients, or the loss, was read off; "" if it is the user's
            word.
        hides_iterates: True if a bound on it may count on iterates that nobody sees.
        secret: Hidden state without which a run of it cannot go on, in words; "" if there is none.
    """

    noise_multiplier: float
    clip_norm: float
    source: str = ""

    hides_iterates: ClassVar[bool] = True
    secret: ClassVar[str] = ""

    @abc.abstractmethod
    def new_run(self, batches: Batches) -> Run:
        """Returns the empty record of a run; raises if no bound knows it with such batches."""

    @abc.abstractmethod
    def checked(self) -> list[str]:
        """Returns what is verified, or done by the software itself, in every step."""

    def step(self, *, learning_rate: float, weight_decay: float = 0.0, **of_batch: Any) -> Step:
        """Returns the record of a step; `of_batch` are batch, rows and longest gradient."""
        rate, decay = self._recorded(learning_rate, weight_decay)
        return Step(
            noise_multiplier=self.noise_multiplier,
            clip_norm=self.clip_norm,
            learning_rate=rate,
            weight_decay=decay,
            **of_batch,
        )

    def _recorded(self, rate: float, decay: float) -> tuple[float, float]:
        """Returns the rate and the decay that a run knows."""
        return rate, decay

    def derived(self) -> list[Assumption]:
        """Returns what takes the place of the user's word of the same topic."""
        return []

    def line_before(self, batches: Batches, relation: NeighboringRelation, rate: float) -> str:
        """Returns a line for the log if nothing contracts at the first learning rate; else ""."""
        return ""


@attrs.frozen(kw_only=True)
class NoisySGD(Algorithm):
    """SGD with decay, proximal map and projection, of which the last iterate is released.

    Any other rule along the noisy mean is accounted by composition.

    Attributes:
        loss: What is known of the loss of a record, before its clip; None if nothing is.
        weight: Bound on a weight of the loss that the geometry already contains.
        prox: Effect of the proximal map in words; "" for none.
        prox_strong_convexity: Modulus of h.
        radius: Radius R of the ball around 0, or inf.
        weight_decay: Decoupled weight decay w.
        other_rule: Name of the rule that is not plain SGD; "" for SGD.
        microbatch: Number of examples of a record, whose mean gradient is clipped. Of several the
            run is accounted by composition, and under REPLACE_ONE only.
    """

    loss: LossGeometry | None = None
    weight: float = 1.0
    prox: str = ""
    prox_strong_convexity: float = 0.0
    radius: float = math.inf
    weight_decay: float = 0.0
    other_rule: str = ""
    microbatch: int = 1

    def new_run(self, batches: Batches) -> Run:
        return LastIterateRun(
            loss=self.loss if self.microbatch == 1 else None,
            prox_strong_convexity=self.prox_strong_convexity,
            domain_diameter=2 * self.radius,
            is_microbatched=self.microbatch > 1,
            **batches,
        )

    def _recorded(self, rate: float, decay: float) -> tuple[float, float]:
        # By composition no rate counts; an event has no decay that expands.
        counts = not self.other_rule and (self.loss is not None or rate * decay < 1)
        return (rate, decay) if counts else (1.0, 0.0)

    def checked(self) -> list[str]:
        rule = (
            f"clip norm and noise as recorded, in every step; {self.other_rule} along the noisy "
            "gradients, its moments as the last step left them"
            if self.other_rule
            else "learning rate, weight decay, clip norm and noise as recorded, in every step"
        )
        checked = [rule]
        if self.loss is not None and self.loss.lipschitz is not None:
            of = "per-example" if self.microbatch == 1 else "microbatches'"
            checked.append(f"{of} gradient norms at most {self.loss.lipschitz:g}")
        if self.microbatch > 1:
            checked.append(
                f"fixed microbatches of {self.microbatch} examples, in the order of the data set: "
                "each is a record of the event, accounted by composition, and its mean gradient is "
                "clipped as one. An example that is replaced moves it by up to twice the clip "
                "norm, which is what REPLACE_ONE says of a record"
            )
        if self.radius < math.inf:
            checked.append(f"all variables together within {self.radius:g} of 0")
        return checked

    def derived(self) -> list[Assumption]:
        of_map = [Assumption.checked(self.prox, Topic.REGULARISER)] if self.prox else []
        if not self.source:
            return of_map
        text = f"per-example loss: {self.loss!r}, {self.source}"
        if self.weight != 1:
            text += f", times a weight of at most {self.weight:g}"
        return [Assumption.checked(text, Topic.LOSS), EVERY_FEATURE, *of_map]

    def line_before(self, batches: Batches, relation: NeighboringRelation, rate: float) -> str:
        run, rows = self.new_run(batches), batches["batch_size"]
        run.add(self.step(learning_rate=rate, weight_decay=self.weight_decay, rows=rows, batch=0))
        return no_contraction_line(run.event(), relation)


@attrs.frozen(kw_only=True)
class DiceSGD(Algorithm):
    """DiceSGD, with any rule along the noisy updates; all iterates are released.

    Attributes:
        error_clip_norm: Clip norm C_2 of the error, in units of the mean update.
        automatic: True if both clips normalise.
        gradient_bound: Bound G on the gradients of all records before the clip, or inf.

    Source: Zhang, Bu, Wu, Hong 2024 (arXiv 2311.14632), Algorithms 2 to 4.
    """

    error_clip_norm: float
    automatic: bool = False
    gradient_bound: float = math.inf

    hides_iterates = False
    secret = "the error of DiceSGD, which is data of the examples without noise"
    unknown: ClassVar[Mapping[str, str]] = {
        "prox": "a proximal map is not in the algorithm",
        "projection_radius": "a projection is not in the algorithm, and would not lower epsilon",
        "max_batch_size": "a capped batch is not a Poisson batch, and the bound on DiceSGD has no "
        "term for the cap",
    }
    """Why what other algorithms have is not for this one, by name."""

    def new_run(self, batches: Batches) -> Run:
        dealt = dict(batches)
        if (cap := dealt.pop("max_batch_size", None)) is not None:
            raise UnsupportedRunError(
                f"Expected max_batch_size = None with DiceSGD, got {cap}: "
                f"{self.unknown['max_batch_size']}. Leave it out."
            )
        return DiceSgdRun(
            noise_multiplier=self.noise_multiplier,
            clip_norm=self.clip_norm,
            error_clip_norm=self.error_clip_norm,
            automatic=self.automatic,
            gradient_bound=self.gradient_bound,
            **dealt,
        )

    def _recorded(self, rate: float, decay: float) -> tuple[float, float]:
        return 1.0, 0.0  # the rule of the update is free

    def checked(self) -> list[str]:
        return [
            "constant noise, clip norms and divisor; both clips exactly min(1, C/|v|) v or "
            "normalised; finite gradients, one row each, in float32 or float64; the same variables",
            "the error of the feedback is in no file that was not asked to hold it",
        ]

    def derived(self) -> list[Assumption]:
        if not self.source or math.isinf(self.gradient_bound):
            return []
        text = f"per-example gradient norms at most {self.gradient_bound:g}: {self.source}"
        return [Assumption.checked(text, Topic.GRADIENT_NORM), EVERY_FEATURE]


@attrs.frozen(kw_only=True)
class BlockCoordinate(Algorithm):
    """DP-MBCD: blocks are updated in turn on the same batch, each through a prox.

    Attributes:
        step_size: Constant learning rate eta.
        num_blocks: Number of blocks p.
        prox_strong_convexity: Modulus of r.
        loss: What is known of the loss of a record as a function of its block, or None.

    Source: Chen & Liu 2025 (arXiv 2407.08233), Algorithm 1.
    """

    step_size: float
    num_blocks: int
    prox_strong_convexity: float = 0.0
    loss: LossGeometry | None = None

    def new_run(self, batches: Batches) -> Run:
        order = batches["batch_order"]
        if order not in (BatchOrder.CYCLIC, BatchOrder.FULL):
            raise UnsupportedRunError(
                'Expected batch_order="cyclic" or "full" with DP-MBCD, got '
                f'"{order.value}": the bound on it is about the same batches in every epoch. Say '
                "one of them."
            )
        return BlockCoordinateRun(
            step_size=self.step_size,
            clip_norm=self.clip_norm,
            num_blocks=self.num_blocks,
            prox_strong_convexity=self.prox_strong_convexity,
            block_loss=self.loss,
            batch_size=batches["batch_size"],
            dataset_size=batches["dataset_size"],
        )

    def checked(self) -> list[str]:
        return [
            "constant learning rate, clip norm, noise multiplier and prox; the clip of each block "
            "as one vector; finite gradients, taken of each block at the values of that moment; "
            "blocks that are together all that is trained"
        ]
