"""Records that are microbatches of several examples."""

from __future__ import annotations

from hidden_state_accountants import LossGeometry
from hidden_state_accountants.events.loss_geometry import LossKind


def of_means(loss: LossGeometry | None) -> LossGeometry | None:
    """The geometry of the mean of several losses.

    It has the smoothness and curvature of its parts, but it is no generalised linear model: their
    gradients have different directions.
    """
    if loss is None or loss.kind is not LossKind.GENERALIZED_LINEAR:
        return loss
    return LossGeometry.convex(loss.smoothness, loss.lipschitz)


def checked_microbatches(examples: int) -> list[str]:
    """What is said of records of so many examples; nothing of single ones."""
    if examples == 1:
        return []
    return [
        f"fixed microbatches of {examples} examples, in the order of the data set: each is a "
        "record of the event, and its mean gradient is clipped as one. An example that is replaced "
        "moves it by up to twice the clip norm, which is what REPLACE_ONE says of a record"
    ]


def checked_norms(loss: LossGeometry | None, examples: int) -> list[str]:
    """What is said of the gradients of a run in which none was longer than the bound.

    Args:
        loss: Of the run.
        examples: Of a microbatch.

    Returns:
        One sentence, or none where no bound is known.
    """
    if loss is None or loss.lipschitz is None:
        return []
    of = "per-example" if examples == 1 else "microbatches'"
    return [f"{of} gradient norms at most {loss.lipschitz:g}"]
