"""Whether a criterion takes every record by itself: one look at one batch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hidden_state_adapters.opacus.gradients.precision import is_half

_TOLERANCE = 1e-3
_ALONE = 4  # records that are looked at one by one, beside both halves

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def losses_are_apart(
    criterion: Any, outputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], divides: bool
) -> bool | None:
    """Whether the gradient of every record is the same in a part of the batch.

    Args:
        criterion: A function of outputs and targets.
        outputs: What the model computed; the first dimension counts the records.
        tensors: What the loader dealt; the last one that the criterion takes is the targets.
        divides: Whether the loss of a batch is the mean of those of its records, not the sum.

    Returns:
        None where it takes none of them.
    """
    if isinstance(criterion, nn.Module):
        criterion = copy.deepcopy(criterion).cpu()  # where no label is fatal
    for output, target in itertools.product(outputs, reversed(tensors)):
        own = output.float() if is_half(output) else output
        found = []
        for form in (_as_it_is, _as_outputs, _as_positions):
            try:
                found.append(_are_apart(form(criterion), own.cpu(), target.cpu(), divides))
            except Exception:  # whatever a criterion may raise that is given something else
                continue
        if found:
            return any(found)  # in another form targets may be broadcast
    return None


def _as_it_is(criterion: Loss) -> Loss:
    return criterion


def _as_outputs(criterion: Loss) -> Loss:
    """Of targets in the shape and type of the outputs."""
    return lambda output, target: criterion(output, target.reshape(output.shape).to(output))


def _as_positions(criterion: Loss) -> Loss:
    """Of classes at every position of every record, as a loop flattens them."""
    return lambda output, target: criterion(output.flatten(0, -2), target.flatten())


def _are_apart(loss: Loss, output: torch.Tensor, target: torch.Tensor, divides: bool) -> bool:
    whole = _gradient(loss, output, target, divides)
    if not torch.equal(whole, _gradient(loss, output, target, divides)):
        raise ValueError("The criterion draws random numbers.")
    for part in _parts(len(output)):
        rows = slice(part.start, part.stop)
        off = _gradient(loss, output[rows], target[rows], divides) - whole[rows]
        limit = _TOLERANCE * torch.linalg.vector_norm(whole[rows])
        if not torch.linalg.vector_norm(off) <= limit:
            return False
    return True


def _parts(rows: int) -> Iterator[range]:
    yield from (range(rows // 2), range(rows // 2, rows))
    yield from (range(row, row + 1) for row in range(min(rows, _ALONE)))


def _gradient(
    loss: Loss, output: torch.Tensor, target: torch.Tensor, divides: bool
) -> torch.Tensor:
    """Of the losses of the records, in their outputs."""
    output = output.detach().clone().requires_grad_()
    with torch.enable_grad(), torch.autocast("cpu", enabled=False):
        value = loss(output, target)
        (gradient,) = torch.autograd.grad(value.sum(), output)
    return gradient * len(output) if divides and value.dim() == 0 else gradient
