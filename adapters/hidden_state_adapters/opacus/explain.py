"""What the batches of a stock engine really allow, beside what its accountant claims."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs
from dp_accounting import NeighboringRelation
from opacus import PrivacyEngine
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from hidden_state_accountants import BatchOrder, UnsupportedRunError, validate
from hidden_state_accountants.curves.base import GaussianCurve
from hidden_state_accountants.figures import fixed_up
from hidden_state_adapters.opacus.accounted import Row, undeclared_guarantee
from hidden_state_adapters.opacus.data.loader import OrderedDataLoader
from hidden_state_adapters.opacus.data.order import default_order, refuse_repeated_records
from hidden_state_adapters.opacus.data.reading import is_poisson

_ROUNDED = 1e-3  # relative; what accountants add to be on the safe side
_BATCHES = {
    BatchOrder.POISSON: "every record joins every batch by itself (Poisson sampling) (poisson)",
    BatchOrder.RESHUFFLED: "shuffled anew for every pass, each record at most once in a pass "
    "(reshuffled)",
    BatchOrder.CYCLIC: "the same order in every pass, each record at most once in a pass (cyclic)",
    BatchOrder.FULL: "all records in every batch (full)",
}


@attrs.frozen(kw_only=True)
class EngineExplanation:
    """What `explain_engine` found; `print` it.

    Attributes:
        batches: What the loader deals, in words.
        order: The order of the batches; None if nobody can read it.
        num_steps: Steps that the engine recorded.
        delta: Where epsilons are read.
        claimed: Epsilon that the engine's accountant reports, for Poisson batches and a record that
            is added or removed; None before the first step.
        proven: Epsilon of the composition of the recorded steps with the batches of the loader;
            None before the first step, and where no bound is known.
        relation: Of `proven`: ADD_OR_REMOVE_ONE for Poisson batches; elsewhere REPLACE_SPECIAL (a
            record against one without gradient, which has the same sensitivity).
    """

    batches: str
    order: BatchOrder | None
    num_steps: int
    delta: float
    claimed: float | None
    proven: float | None
    relation: NeighboringRelation | None

    @property
    def is_covered(self) -> bool:
        """Whether the claim is no smaller than what is proven, but for rounding."""
        if self.claimed is None or self.proven is None:
            return False
        return self.proven <= self.claimed * (1 + _ROUNDED)

    def __str__(self) -> str:
        lines = [f"batches of the loader: {self.batches}"]
        if self.claimed is None:
            return f"{lines[0]}\nno step was taken yet, so there is no epsilon to compare"
        is_poisson_order = self.order is BatchOrder.POISSON
        proven = "nothing here; no bound is about such batches"
        if self.proven is not None and self.relation is not None:
            passes = "" if is_poisson_order else ", if every pass went to its end"
            proven = (
                f"epsilon = {fixed_up(self.proven, 4)} ({self.relation.name}), with every iterate "
                f"released{passes}"
            )
        verdicts = {
            (True, True): "The claim is one of this run.",
            (True, False): "The claim is too small for these batches: use the prv or rdp "
            "accountant of Opacus.",
            (False, True): "The claim is no smaller, but it is about other batches.",
            (False, False): "The claim is NOT one of this run. Train on the loader that "
            "make_private returned with poisson_sampling=True, or use "
            "hidden_state_adapters.opacus.HiddenStatePrivacyEngine, which deals every order and "
            "reports its epsilon.",
        }
        lines += [
            f"claimed: epsilon = {fixed_up(self.claimed, 4)} at delta = {self.delta:g} after "
            f"{self.num_steps} steps, for Poisson batches",
            f"proven: {proven}",
            verdicts[is_poisson_order, self.is_covered],
        ]
        return "\n".join(lines)


def explain_engine(
    engine: PrivacyEngine, data_loader: DataLoader, delta: float = 1e-5
) -> EngineExplanation:
    """Says what the batches of a stock engine really allow, beside what its accountant claims.

    Opacus' accountants take Poisson batches for granted, whatever the loop trains on: with
    ``poisson_sampling=False``, and where the loop iterates the loader that went into make_private
    and not the one that came out, their figure is not one of the run.

    Formal guarantees:
      - `proven` holds for the steps that the engine recorded if their batches were those of
        `data_loader`, and its passes were iterated to their ends, which you declare.
      - Poisson batches: composition under ADD_OR_REMOVE_ONE. Batches that hold a record at most
        once in a pass: one Gaussian mechanism in a pass, with the smallest noise of its steps,
        under REPLACE_SPECIAL. Every iterate may be released.

    Args:
        engine: Of Opacus, after make_private, before or after training.
        data_loader: What the training loop iterates.
        delta: Where epsilons are read, in [0, 1].

    Raises:
        TypeError: The engine or the loader is one of this package, whose `report` says all this;
            or they are something else.
    """
    is_stock = isinstance(engine, PrivacyEngine) and not hasattr(engine, "report")
    is_own = isinstance(data_loader, OrderedDataLoader)
    if not is_stock or is_own or not isinstance(data_loader, DataLoader):
        raise TypeError(
            "Expected an opacus.PrivacyEngine and the torch.utils.data.DataLoader of its training "
            f"loop, got {type(engine).__name__} and {type(data_loader).__name__}. "
            "HiddenStatePrivacyEngine checks its batches itself: use engine.report(delta)."
        )
    validate.target_delta(delta)
    try:
        order: BatchOrder | None = _order(data_loader)
        refuse_repeated_records(data_loader.dataset)
    except UnsupportedRunError as error:
        order, batches = None, f"not known: {error}"
    else:
        assert order is not None
        batches = _BATCHES[order]
    rows: tuple[Row, ...] = tuple((z, q, steps) for z, q, steps in engine.accountant.history)
    num_steps = sum(steps for _, _, steps in rows)
    proven = _proven(order, rows, data_loader, delta) if num_steps else None
    of_poisson = order is BatchOrder.POISSON
    relations = (NeighboringRelation.REPLACE_SPECIAL, NeighboringRelation.ADD_OR_REMOVE_ONE)
    return EngineExplanation(
        batches=batches,
        order=order,
        num_steps=num_steps,
        delta=delta,
        claimed=engine.accountant.get_epsilon(delta) if num_steps else None,
        proven=proven,
        relation=None if proven is None else relations[of_poisson],
    )


def _order(data_loader: DataLoader) -> BatchOrder:
    if is_poisson(data_loader):
        return BatchOrder.POISSON
    batches: Any = data_loader.batch_sampler
    sampler: Any = getattr(batches, "sampler", None)
    indices = sampler.indices if type(sampler) is SubsetRandomSampler else sampler
    deals_once = type(sampler) is SequentialSampler
    if type(sampler) is RandomSampler:
        deals_once = not sampler.replacement and sampler.num_samples <= len(sampler.data_source)
    elif isinstance(indices, list | tuple | range):
        deals_once = len(set(indices)) == len(indices)
    if not deals_once or type(batches) is not BatchSampler:
        name = type(sampler if type(batches) is BatchSampler else batches).__name__
        raise UnsupportedRunError(f"{name} may deal a record several times in a pass")
    return default_order(data_loader, False)


def _proven(
    order: BatchOrder | None, rows: Sequence[Row], data_loader: DataLoader, delta: float
) -> float | None:
    r"""Epsilon of the composition of the steps of Opacus' history, with batches of the loader.

    A record that takes part once in a pass, where the noise is smallest, has

    .. math:: \mu^2 = \sum_{\text{passes}} \max_{t \in \text{pass}} z_t^{-2}

    (Dong, Roth, Su 2022, Corollary 3.3, arXiv 1905.02383 v3).
    """
    num_batches = len(data_loader)
    if order is BatchOrder.POISSON:
        rate = float(data_loader.batch_sampler.sample_rate)  # type: ignore[union-attr]
        return undeclared_guarantee(tuple((z, max(q, rate), k) for z, q, k in rows)).epsilon(delta)
    if order is None or any(q * num_batches > 1.5 for _, q, _ in rows):
        return None  # several batches were accumulated in a step
    smallest: dict[int, float] = {}  # of a pass
    first = 0
    for noise, _, steps in rows:
        for index in range(first // num_batches, (first + steps - 1) // num_batches + 1):
            smallest[index] = min(noise, smallest.get(index, math.inf))
        first += steps
    is_bare = min(smallest.values()) == 0
    mu = math.inf if is_bare else math.sqrt(sum(z**-2 for z in smallest.values()))
    return GaussianCurve(mu).epsilon(delta)
