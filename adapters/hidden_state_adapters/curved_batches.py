"""What both engines say of a declared bound on how curved the mean loss of a batch is."""

from __future__ import annotations

from hidden_state_accountants import Assumption, LossGeometry

ROUNDING = 1e-6  # relative, of the largest eigenvalue of a Gram matrix in float64


def curvature_matters(loss: LossGeometry | None) -> bool:
    """Whether the bound says more than that every record's loss is smooth."""
    return loss is not None and loss.curvature is not None and loss.curvature < loss.smoothness


def checked_curvature(loss: LossGeometry) -> Assumption:
    """What was verified of every batch."""
    return Assumption.checked(f"the mean loss of every batch is {loss.curvature:g}-smooth")


def remedy(loss: LossGeometry) -> str:
    """What to do where a batch is more curved, and how likely that was."""
    text = (
        "Release a bound for the batches of this run, with "
        "hidden_state_accountants.release_curvature, or leave it out."
    )
    if loss.curvature_failure is None:
        return text
    return (
        f"{text} The probability of this is among the {loss.curvature_failure:g} that delta counts "
        "if the bound was released for such batches."
    )
