"""Records of runs by an adapter: steps are checked, counted, released and stored.

An adapter writes a run as a list of `Step`s. What follows from them (the event, the guarantee, a
state that a checkpoint can hold) is the same for all frameworks and belongs to the `Run`.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
from dp_accounting import DpEvent, NeighboringRelation

from hidden_state_accountants import validate
from hidden_state_accountants.accountants import with_changes
from hidden_state_accountants.best_bound import best_guarantee, check_covered
from hidden_state_accountants.errors import UnsupportedRunError
from hidden_state_accountants.events.batch_order import OF_RANDOM_SIZE, BatchOrder
from hidden_state_accountants.events.block_coordinate import BlockCoordinateDpEvent
from hidden_state_accountants.events.dice_sgd import DiceSgdDpEvent
from hidden_state_accountants.events.last_iterate import LastIterateDpEvent
from hidden_state_accountants.events.plain_types import SCHEMA
from hidden_state_accountants.events.schedule import Schedule, mapped
from hidden_state_accountants.guarantee import Guarantee

SLACK = 1e-6
"""Rounding in float32, relative, of a norm that is exactly at its bound."""

_STATE = {"schema", "declared", "num_steps", "release_steps", "runs"}


@attrs.frozen(kw_only=True)
class Step:
    """One logical step, with the values that it really used.

    Attributes:
        noise_multiplier: Standard deviation of the noise on the sum of gradients over clip_norm.
        clip_norm: None if the gradients were not clipped.
        learning_rate: Rate of the mean gradient.
        weight_decay: Decoupled.
        batch: Index of the batch within the epoch, where the batches have an order.
        rows: Records of the logical batch; None if they were not counted, of random batches.
        largest_norm: Norm of the longest per-example gradient before the clip; 0 if not measured.
    """

    noise_multiplier: float
    clip_norm: float | None
    learning_rate: float = 1.0
    weight_decay: float = 0.0
    batch: int | None = None
    rows: int | None = None
    largest_norm: float = 0.0


class Run(abc.ABC):
    """Records a run step by step, and refuses a step that is not one of the declared run.

    A subclass is about one kind of event and says which of its fields the steps decide. A step
    costs O(1) time; constant values cost O(1) memory however long the run is.

    Args:
        **declared: The fields of the event that are the same in all steps, as the event takes them.

    Raises:
        TypeError, ValueError: As the event.

    Attributes:
        event_type: The kind of event that the run becomes.
        of_one_step: The fields that the steps decide, as those of an event of one step.
        series: The fields of a `Step` that are recorded one by one.
        bound_name: The declared bound on all gradients.
    """

    event_type: ClassVar[type[DpEvent]]
    of_one_step: ClassVar[Mapping[str, Any]]
    series: ClassVar[tuple[str, ...]] = ()
    bound_name: ClassVar[str]

    def __init__(self, **declared: Any):
        # The constructor of the event is the one place that knows what is valid.
        self._start(self.event_type(**declared, **self.of_one_step))

    def _start(self, template: Any) -> None:
        self._template = template
        self.num_steps = 0
        self._release_steps: list[int] = []
        # The arguments of a Schedule: equal neighbours are stored once.
        self._series: dict[str, dict[str, list[Any]]] = {
            name: {"values": [], "lengths": []} for name in self.series
        }

    # What happens

    def add(self, step: Step) -> None:
        """Records one logical step; nothing is recorded if it raises.

        Raises:
            UnsupportedRunError: It is not a step of the declared run.
            TypeError, ValueError: No step can have these values.
        """
        own = self._template
        expected = self.num_steps % own.batches_per_epoch
        if own.batch_order is BatchOrder.CYCLIC and step.batch != expected:
            raise UnsupportedRunError(
                f"step {self.num_steps + 1} used batch {step.batch}, expected batch {expected}: a "
                f"cyclic run visits batches 0 to {own.batches_per_epoch - 1} in order, each "
                "exactly once per epoch. Iterate the private loader to its end and step once per "
                "batch."
            )
        self.add_counted(step, 1)

    def add_counted(self, step: Step, num_steps: int) -> None:
        """Records equal steps that were counted elsewhere; the index of no batch is known.

        Raises:
            UnsupportedRunError, TypeError, ValueError: As `add`.
        """
        if not validate.integer("num_steps", num_steps, minimum=0):
            return
        first, last = self.num_steps + 1, self.num_steps + num_steps
        where = f"step {first}" if num_steps == 1 else f"one of steps {first} to {last}"
        self._check_rows(step.rows, where)
        self._check_values(step, where)
        bound = self._norm_bound()
        limit = math.inf if bound is None else bound
        if not step.largest_norm <= limit * (1 + SLACK):  # NaN among them
            raise UnsupportedRunError(
                f"Expected {self.bound_name} >= {step.largest_norm:.8g}, the largest gradient of "
                f"{where}, got {limit:.8g}. A bound has to be proven from the loss and the norm of "
                "the features, not read off a run. Correct it, or leave it out."
            )
        for name, series in self._series.items():
            if (value := getattr(step, name)) is None:
                continue
            if series["values"] and series["values"][-1] == value:
                series["lengths"][-1] += num_steps
            else:
                series["values"].append(float(value))
                series["lengths"].append(num_steps)
        self.num_steps += num_steps

    def _check_rows(self, rows: int | None, where: str) -> None:
        """Refuses a batch that has not the declared number of records."""
        own, order = self._template, self._template.batch_order
        cap = getattr(own, "max_batch_size", None)
        if rows is None:
            if cap is not None or order in (BatchOrder.FULL, BatchOrder.CYCLIC):
                raise TypeError(f"Expected the rows of {order.name} batches, got None.")
        elif order not in OF_RANDOM_SIZE:
            if rows != own.batch_size:
                raise UnsupportedRunError(
                    f"{where} used {rows} rows, expected batch_size = {own.batch_size}. Drop the "
                    "rest of the data set, or declare POISSON batches (not of DP-MBCD) if every "
                    "record was drawn for every batch by itself."
                )
        elif rows > (cap or own.dataset_size):
            name = "dataset_size" if cap is None else "max_batch_size"
            raise UnsupportedRunError(
                f"{where} used more rows than {name} = {cap or own.dataset_size}."
            )

    @abc.abstractmethod
    def _check_values(self, step: Step, where: str) -> None:
        """Refuses a step whose values are impossible, or not the declared ones."""

    @abc.abstractmethod
    def _norm_bound(self) -> float | None:
        """The declared bound on all gradients."""

    def release(self) -> None:
        """Marks the current iterate as released (again changes nothing)."""
        if self.num_steps and self.num_steps not in self._release_steps[-1:]:
            self._release_steps.append(self.num_steps)

    @property
    def release_steps(self) -> tuple[int, ...]:
        """The steps after which `release` was called."""
        return tuple(self._release_steps)

    # What is said about it

    def event(self) -> Any:
        """The event that happened.

        Raises:
            ValueError: No step was recorded.
            UnsupportedRunError: The steps are not those of a whole run.
        """
        if not self.num_steps:
            raise ValueError("Expected at least one step, got none yet.")
        return attrs.evolve(self._template, **self._of_steps())

    @abc.abstractmethod
    def _of_steps(self) -> dict[str, Any]:
        """The fields of the event that the steps decide; there are steps."""

    def _values(self, name: str) -> float | Schedule | None:
        """Those of all steps: a number if all are equal, None if there is none."""
        series = self._series[name]
        if len(series["values"]) < 2:
            return series["values"][0] if series["values"] else None
        return Schedule(**series)

    def guarantee(self, relation: NeighboringRelation | str) -> Guarantee:
        """The best sound guarantee if the current iterate were the last one.

        Raises:
            ValueError: No step was recorded.
            UnsupportedRunError: No bound applies.
        """
        relation = validate.neighboring_relation(relation)
        self.check_relation(relation)
        event = self.event()
        return with_changes(best_guarantee(event, relation), event, relation)

    def check_relation(self, relation: NeighboringRelation | str) -> None:
        """Raises UnsupportedRunError if no bound can cover such a run under `relation`."""
        check_covered(self._template, validate.neighboring_relation(relation))

    # How it goes on elsewhere

    def _declared(self) -> dict[str, Any]:
        """Fields that are the same in all steps, as plain types; "type" names the kind of event."""
        of_steps = set(self.of_one_step) - {"num_steps"}
        plain = self._template.to_dict()
        return {name: value for name, value in plain.items() if name not in of_steps}

    def state_dict(self) -> dict[str, Any]:
        """Plain types (numbers, strings, lists, dictionaries) that restore the run.

        It holds nothing that is computed from the records: it is in every public checkpoint.
        """
        return {
            "schema": SCHEMA,
            "declared": self._declared(),
            "num_steps": self.num_steps,
            "release_steps": list(self._release_steps),
            "runs": copy.deepcopy(self._series),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores what `state_dict` returned, into an empty record of the same run.

        Raises:
            TypeError, ValueError: The declared runs differ (the text names the field), the state
                is no state, or steps are recorded here already: spent budget is never forgotten.
                Nothing is changed then.
        """
        if self.num_steps:
            raise ValueError(
                f"Expected a recorder without steps, got one with {self.num_steps}: they were "
                "taken on the data and stay accounted. Restore into a fresh recorder."
            )
        missing = _STATE - set(state)
        if missing or state["schema"] != SCHEMA:
            raise ValueError(
                f"Expected the state of a {type(self).__name__} with schema {SCHEMA}, "
                f"got schema {state.get('schema')!r}, missing keys {sorted(missing)}."
            )
        own, other = self._declared(), dict(state["declared"])
        for name in ("type", *sorted(set(own) | set(other))):
            if own.get(name) != other.get(name):
                raise ValueError(
                    f"The state is of another run: expected {name} = {own.get(name)!r}, "
                    f"got {other.get(name)!r}."
                )
        restored = copy.copy(self)
        restored.num_steps = validate.integer("num_steps", state["num_steps"], minimum=0)
        restored._release_steps = list(state["release_steps"])
        restored._series = {name: copy.deepcopy(dict(state["runs"][name])) for name in self.series}
        if restored.num_steps:
            with contextlib.suppress(UnsupportedRunError):  # it ended within an epoch
                restored.event()  # an impossible value raises
        vars(self).update(vars(restored))


def run_of(state: Mapping[str, Any]) -> Run:
    """The run, with its steps, that a `state_dict` is of.

    Raises:
        TypeError, ValueError: The state is of no known kind of run, or has impossible values.
    """
    declared = dict(state.get("declared") or {})
    kinds: dict[str, Any] = {kind.event_type.__name__: kind for kind in Run.__subclasses__()}
    name = declared.get("type")
    if name not in kinds:
        raise ValueError(f"Expected the state of a run of {' or '.join(kinds)}, got {name!r}.")
    kind = kinds[name]
    run: Run = kind.__new__(kind)
    run._start(kind.event_type.from_dict({**declared, **kind.of_one_step}))
    run.load_state_dict(state)
    return run


class LastIterateRun(Run):
    """Noisy SGD of which the last iterate is released, and those after `release`.

    It is public as `hidden_state_accountants.RunRecorder`.

    Args:
        **declared: `batch_order`, `batch_size` and `dataset_size`; as far as they are not those of
            an ordinary run `loss`, `prox_strong_convexity`, `domain_diameter`, `sampling_rate`,
            `max_batch_size` and `is_microbatched`. All as for `LastIterateDpEvent`.

    Raises:
        TypeError, ValueError: As `LastIterateDpEvent`.
    """

    event_type = LastIterateDpEvent
    series = ("noise_multiplier", "learning_rate", "clip_norm", "weight_decay")
    of_one_step: ClassVar = {
        "noise_multiplier": 1.0,
        "learning_rate": 0.0,
        "clip_norm": 1.0,
        "weight_decay": 0.0,
        "num_steps": 1,
    }
    bound_name = "loss.lipschitz"

    def _norm_bound(self) -> float | None:
        loss = self._template.loss
        return None if loss is None else loss.lipschitz

    def _check_values(self, step: Step, where: str) -> None:
        last = {n: s["values"][-1] if s["values"] else None for n, s in self._series.items()}
        values = {name: getattr(step, name) for name in self.series}
        if values == last:
            return
        try:
            attrs.evolve(self._template, **values)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{where}: {error}") from error
        if self.num_steps and (last["clip_norm"] is None) is not (step.clip_norm is None):
            clips = step.clip_norm is not None
            raise UnsupportedRunError(
                f"{where} {'clips' if clips else 'does not clip'} gradients, earlier steps "
                f"{'do not' if clips else 'do'}: clip in every step or in none."
            )

    def _of_steps(self) -> dict[str, Any]:
        series = {name: self._values(name) for name in self.series}
        return {"num_steps": self.num_steps, "release_steps": self.release_steps, **series}


RunRecorder = LastIterateRun
"""The public name."""


class DiceSgdRun(Run):
    """DiceSGD, whose settings are constant.

    Every iterate is covered, so a release changes no figure. It is remembered all the same, because
    a run may not go back to before it.

    Args:
        noise_multiplier: Standard deviation of the noise on the sum of gradients over clip_norm.
        clip_norm: C_1, of each gradient.
        batch_size: B, the divisor and, unless POISSON, the number of rows of every batch.
        **declared: Fields of `DiceSgdDpEvent`: `error_clip_norm`, `dataset_size`, `batch_order`,
            and as far as they are known `automatic`, `gradient_bound` and `sampling_rate`.

    Raises:
        TypeError, ValueError: As `DiceSgdDpEvent`.
    """

    event_type = DiceSgdDpEvent
    of_one_step: ClassVar = {"num_steps": 1}
    bound_name = "gradient_bound"

    def __init__(
        self, *, noise_multiplier: float, clip_norm: float, batch_size: int, **declared: Any
    ):
        noise_std = _noise_std(noise_multiplier, clip_norm, batch_size)
        sizes = {"clip_norm": clip_norm, "batch_size": batch_size}
        super().__init__(noise_std=noise_std, **sizes, **declared)

    def _norm_bound(self) -> float | None:
        return float(self._template.gradient_bound)

    def _check_values(self, step: Step, where: str) -> None:
        own = self._template
        std = _noise_std(step.noise_multiplier, own.clip_norm, own.batch_size)
        _check_constant(
            f"{where} used %s: the bound on DiceSGD is about constant values.",
            {
                "clip_norm": (step.clip_norm, own.clip_norm),
                "noise of standard deviation (on the mean update)": (std, own.noise_std),
            },
        )

    def _of_steps(self) -> dict[str, Any]:
        return {"num_steps": self.num_steps}


def _noise_std(noise_multiplier: float, clip_norm: float, batch_size: int) -> float:
    validate.magnitude("noise_multiplier", noise_multiplier)
    validate.magnitude("clip_norm", clip_norm, positive=True)
    validate.integer("batch_size", batch_size, minimum=1)
    # ZBWH24, Algorithm 2, arXiv 2311.14632: the noise is on the mean update
    return noise_multiplier * clip_norm / batch_size


def _check_constant(text: str, values: Mapping[str, tuple[Any, float]]) -> None:
    """Refuses a step by `text` unless its values are the declared ones."""
    for name, (value, declared) in values.items():
        if value != declared:
            raise UnsupportedRunError(text % f"{name} = {value}, expected {declared:g}")


class BlockCoordinateRun(Run):
    r"""DP-MBCD: in every step each of p blocks in turn made

    .. math::
        \theta \leftarrow \mathrm{Prox}_{\eta, r}\Big(\theta - \frac{\eta}{b}\Big(
            \sum_{i \in B} \mathrm{clip}_C(g_i) + \mathcal{N}(0, (z C)^2 I)\Big)\Big)

    with the gradient of every record for the block, as one vector, multiplied by exactly
    :math:`\min(1, C/|g_i|)`, and every step with b records. The noise multiplier z may differ from
    step to step. After a release within the run nothing is declared of the blocks' loss, so that
    the guarantee is one by composition, which covers it (docs/papers/block_coordinate.md).

    Args:
        **declared: Fields of `BlockCoordinateDpEvent`: `step_size` (the `learning_rate` of every
            step), `clip_norm`, `batch_size`, `dataset_size`, `num_blocks` and, as far as they are
            known, `prox_strong_convexity` and `block_loss`, whose `lipschitz` is compared with the
            gradients of every step.

    Raises:
        TypeError, ValueError: As `BlockCoordinateDpEvent`.
    """

    event_type = BlockCoordinateDpEvent
    series = ("noise_multiplier",)
    of_one_step: ClassVar = {"noise_variance": 0.0, "num_epochs": 1}
    bound_name = "block_loss.lipschitz"

    def _norm_bound(self) -> float | None:
        loss = self._template.block_loss
        return None if loss is None else loss.lipschitz

    def _check_values(self, step: Step, where: str) -> None:
        own = self._template
        _check_constant(
            f"{where} used %s: the bound on DP-MBCD is about constant values.",
            {
                "clip_norm": (step.clip_norm, own.clip_norm),
                "learning_rate": (step.learning_rate, own.step_size),
                "weight_decay": (step.weight_decay, 0.0),
            },
        )
        validate.magnitude("noise_multiplier", step.noise_multiplier)

    def _of_steps(self) -> dict[str, Any]:
        own, noise = self._template, self._values("noise_multiplier")
        if unequal := own.unequal_batches():
            raise UnsupportedRunError(unequal)
        epochs, rest = divmod(self.num_steps, own.batches_per_epoch)
        if rest:
            raise UnsupportedRunError(
                f"Expected whole epochs of {own.batches_per_epoch} steps, got {self.num_steps} "
                "steps. Finish the epoch; a number of steps that depends on the records has no "
                "guarantee."
            )
        # 2 eta o = (eta z C / b)^2: Chen & Liu 2025, (6), arXiv 2407.08233
        fields: dict[str, Any] = {
            "num_epochs": epochs,
            "noise_variance": mapped(
                lambda z: own.step_size * (z * own.clip_norm / own.batch_size) ** 2 / 2,
                noise or 0.0,
            ),
        }
        if any(step < self.num_steps for step in self._release_steps):
            fields["block_loss"] = None  # nothing is hidden between the steps
        return fields
