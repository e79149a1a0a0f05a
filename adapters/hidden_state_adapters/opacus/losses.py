r"""Losses whose per-example gradient is bounded and smooth: no clip acts, and c = 1 - lr * decay.

They are used like torch's own criteria. Each is the Huber envelope of the loss in its name,

.. math:: L(z) = \min_u\; l(u) + h(z - u), \qquad
    h(v) = |v|^2/(2m) \text{ up to } |v| = mC, \text{ then } C|v| - mC^2/2

(docs/theory/moduli.md): convex, with gradients in the predictions no longer than `clip_norm` and
Lipschitz with the constant 1/(1/M + smoothing), M being that of the plain loss. Values and
gradients are computed in float64, on a CPU with NumPy. How long that takes depends on the records.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import nn

from hidden_state_accountants import Candidate, LossGeometry, validate
from hidden_state_accountants.losses import envelope, scalar
from hidden_state_accountants.losses.arrays import NUMPY, Array, Arrays
from hidden_state_accountants.losses.linear import PROBABILITY_SLACK
from hidden_state_accountants.losses.softmax import SoftmaxEnvelope, solve

_REDUCTIONS = ("mean", "sum", "none")
_Pair = tuple[torch.Tensor, torch.Tensor]

TORCH = Arrays(
    exp=torch.exp,
    log=torch.log,
    sqrt=torch.sqrt,
    abs=torch.abs,
    sigmoid=torch.sigmoid,
    tanh=torch.tanh,
    where=torch.where,
    maximum=lambda array, least: array.clamp(min=least),
    minimum=lambda array, most: array.clamp(max=most),
    total=lambda array: array.sum(dim=0),
    largest=lambda array: array.amax(dim=0),
    softmax=lambda array: array.softmax(dim=1),
    like=lambda numbers, array: torch.from_numpy(numbers).to(array),
    when=lambda holds, function, array: function() if holds.any() else array,
)


class _Losses(torch.autograd.Function):
    """The losses of records and, found together with them, their gradients."""

    @staticmethod
    def forward(predictions: torch.Tensor, evaluate: Callable[[torch.Tensor], _Pair]) -> _Pair:
        return evaluate(predictions)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: _Pair) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, weights: torch.Tensor, _: Any) -> tuple[torch.Tensor, None]:
        (gradients,) = ctx.saved_tensors
        shape = (*weights.shape, *[1] * (gradients.dim() - weights.dim()))
        return weights.reshape(shape) * gradients, None


class EnvelopeLoss(nn.Module):
    """A loss that is the envelope of another one.

    Attributes:
        clip_norm: Clip norm C.
        smoothing: Smoothing m.
        reduction: Reduction over the records, "mean", "sum" or "none".
        curvature: Lipschitz constant M of the plain loss' gradient in the predictions; for
            `hidden_state_accountants.envelope_smoothing`.
        takes_several_outputs: True if a record may have several predictions.
    """

    curvature: float
    takes_several_outputs: ClassVar[bool] = False
    _geometry: ClassVar[Callable[..., LossGeometry]]
    _kink: ClassVar[str] = ""
    _least_clip_norm: ClassVar[float] = 0.0
    _names: ClassVar[tuple[str, ...]] = ("clip_norm", "smoothing")
    _latest: ClassVar[tuple[Any, ...]] = ()  # what was asked, and found: the step asks it again

    def __init__(self, clip_norm: float, smoothing: float = 0.0, reduction: str = "mean"):
        super().__init__()
        self.clip_norm = envelope.check_clip_norm(clip_norm, least=self._least_clip_norm)
        self.smoothing = envelope.check_smoothing(smoothing, needed_by=self._kink)
        if reduction not in _REDUCTIONS:
            raise ValueError(
                f"Expected reduction to be one of {', '.join(_REDUCTIONS)}, got {reduction!r}."
            )
        self.reduction = reduction

    def extra_repr(self) -> str:
        settings = (f"{name}={value:g}" for name, value in self._settings.items())
        return f"{', '.join(settings)}, reduction={self.reduction!r}"

    def geometry(self, feature_norm: float, bias: bool = False) -> LossGeometry:
        """Returns the loss of a linear model, as a function of its parameters.

        Args:
            feature_norm: Bound on the L2 norm of every record's features.
            bias: True if a bias is trained as well.
        """
        return self._geometry(feature_norm, bias, **self._settings)

    @property
    def _settings(self) -> dict[str, float]:
        """Numbers that its constants depend on."""
        return {name: getattr(self, name) for name in self._names}

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Returns the loss of a batch; raises ValueError for targets that it is not made for."""
        losses: torch.Tensor = _Losses.apply(input, lambda z: self._evaluated(z, target))[0]
        if self.reduction == "none":
            return losses
        return losses.mean() if self.reduction == "mean" else losses.sum()

    def slopes(self, predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns the gradient of the loss of every record in its predictions, without a reduction.

        Raises:
            ValueError: Targets that the loss is not made for.
        """
        return self._evaluated(predictions, targets)[1]

    def _evaluated(self, predictions: torch.Tensor, targets: torch.Tensor) -> _Pair:
        """Returns values and gradients, in the type of the predictions."""
        settings, tensors = (type(self), self._settings), (predictions.detach(), targets.detach())
        last = EnvelopeLoss._latest
        if not (last and last[0] == settings and all(map(_same, last[1], tensors))):
            last = settings, [tensor.clone() for tensor in tensors], self._evaluate(*tensors)
            EnvelopeLoss._latest = last
        values, gradients = last[2]
        return values.to(predictions), gradients.to(predictions)

    def _evaluate(self, predictions: torch.Tensor, targets: torch.Tensor) -> _Pair:
        """Returns values and gradients of the records, in float64."""
        targets = self._checked(predictions, targets)
        if not _is_on_host(predictions):
            return self._computed(TORCH, predictions.double(), targets)
        pair = self._computed(NUMPY, predictions.double().numpy(), targets.numpy())
        return torch.from_numpy(pair[0]), torch.from_numpy(pair[1])

    def _checked(self, predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Returns targets of the shape of the predictions, in float64; raises for others."""
        if targets.shape != predictions.shape:
            raise ValueError(
                f"Expected a target for each prediction, of shape {tuple(predictions.shape[1:])} "
                f"for a record, got {tuple(targets.shape[1:])}. Use target.reshape(output.shape)."
            )
        return targets.double()

    def _computed(self, xp: Arrays, predictions: Array, targets: Array) -> tuple[Array, Array]:
        """Returns values and gradients in arrays of a framework."""
        raise NotImplementedError


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    is_alike = one.dtype == other.dtype and one.device == other.device
    return is_alike and torch.equal(one, other)


def _is_on_host(tensor: torch.Tensor) -> bool:
    """Tells whether NumPy can have it, whose operations on small arrays cost half as much."""
    return tensor.device.type == "cpu"


class EnvelopeCrossEntropyLoss(EnvelopeLoss):
    """The envelope of nn.CrossEntropyLoss; any number of classes.

    Called with logits of shape (records, classes) and classes (records,) or probabilities
    (records, classes). The gradients are certified to 1e-12 (1 + the largest difference of two
    logits of the record); one that is not is not a number.

    Args:
        clip_norm: Clip norm C, from 0.01 on; from sqrt(2) on it never acts.
        smoothing: Smoothing m >= 0; more makes the Lipschitz constant of the gradient smaller.
        reduction: Reduction over the records, "mean", "sum" or "none".

    Raises:
        TypeError, ValueError: An argument has an impossible value.
    """

    curvature = 0.5
    takes_several_outputs = True
    _geometry = LossGeometry.envelope_softmax_cross_entropy
    _least_clip_norm = envelope.LEAST_SOFTMAX_CLIP_NORM

    def _checked(self, predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if predictions.dim() != 2 or predictions.shape[1] < 2:
            raise ValueError(
                "Expected logits of shape (records, classes) with two classes or more, got "
                f"{tuple(predictions.shape[1:])} for each record."
            )
        records, classes = predictions.shape
        if targets.is_floating_point():
            targets = super()._checked(predictions, targets)
            sums = targets.sum(dim=1, keepdim=True)
            if not bool((targets >= 0).all() & ((sums - 1).abs() < PROBABILITY_SLACK).all()):
                raise ValueError("Expected targets >= 0 that sum to 1 for every record.")
            return targets / sums
        if targets.shape != (records,):
            raise ValueError(
                "Expected one class for each record of the logits, got others, of shape "
                f"{tuple(targets.shape[1:])} each."
            )
        if records and not bool(((targets >= 0) & (targets < classes)).all()):
            raise ValueError(
                f"Expected classes from 0 to {classes - 1}, got {int(targets.min())} to "
                f"{int(targets.max())}. No class is ignored: remove such records beforehand."
            )
        zeros = torch.zeros(predictions.shape, dtype=torch.float64, device=predictions.device)
        return zeros.scatter_(1, targets.long().unsqueeze(1), 1.0)

    def _computed(self, xp: Arrays, predictions: Array, targets: Array) -> tuple[Array, Array]:
        if xp is NUMPY:
            return envelope.softmax_envelope(predictions, targets, **self._settings)
        columns = (array.T.contiguous() for array in (predictions, targets))
        problem = SoftmaxEnvelope.of(xp, *columns, **self._settings)
        point = solve(problem)
        return problem.value(point), problem.gradient(point).T


class EnvelopeBCEWithLogitsLoss(EnvelopeLoss):
    """The envelope of nn.BCEWithLogitsLoss, for every entry by itself; for one output.

    Called with logits and targets in [0, 1] of one shape. Arguments and errors are those of
    `EnvelopeCrossEntropyLoss`; from C = 1 on it never acts.
    """

    curvature = 0.25
    _geometry = LossGeometry.envelope_logistic

    def _checked(self, predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        targets = super()._checked(predictions, targets)
        if not bool(((targets >= 0) & (targets <= 1)).all()):
            raise ValueError("Expected targets from 0 to 1, got others.")
        return targets

    def _computed(self, xp: Arrays, predictions: Array, targets: Array) -> tuple[Array, Array]:
        return scalar.logistic(xp, predictions, targets, **self._settings)


class EnvelopeHingeLoss(EnvelopeLoss):
    """The envelope of max(0, 1 - target * prediction), for every entry by itself; for one output.

    Called with predictions and targets -1 or 1 of one shape. Arguments and errors are those of
    `EnvelopeCrossEntropyLoss`, with m > 0; from C = 1 on it never acts.
    """

    curvature = math.inf
    _geometry = LossGeometry.envelope_hinge
    _kink = "hinge"

    def _checked(self, predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        targets = super()._checked(predictions, targets)
        if not bool((targets.abs() == 1).all()):
            raise ValueError(
                "Expected targets -1 and 1, got others. Use 2 * target - 1 for 0 and 1."
            )
        return targets

    def _computed(self, xp: Arrays, predictions: Array, targets: Array) -> tuple[Array, Array]:
        return scalar.hinge(xp, predictions, targets, **self._settings)


class EnvelopeSquaredErrorLoss(EnvelopeLoss):
    """The envelope of (scale/2) |prediction - target|**2 of a record; any number of outputs.

    Called with predictions and targets of one shape, (records,) or (records, outputs). The squares
    of a record's outputs are added up (nn.MSELoss takes their mean), and the clip acts on the
    gradient in all of them. Other arguments and errors are those of `EnvelopeCrossEntropyLoss`.

    Args:
        scale: Factor of the loss, 1 for half the squared error; nn.MSELoss of one output has 2.
    """

    takes_several_outputs = True
    _geometry = LossGeometry.envelope_squared_error
    _names = ("clip_norm", "smoothing", "scale")

    def __init__(
        self,
        clip_norm: float,
        smoothing: float = 0.0,
        scale: float = 1.0,
        reduction: str = "mean",
    ):
        super().__init__(clip_norm, smoothing, reduction)
        self.scale = validate.real("scale", scale, above=0)

    @property
    def curvature(self) -> float:  # type: ignore[override]
        """Lipschitz constant M of the plain loss' gradient."""
        return self.scale

    def _checked(self, predictions: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if predictions.dim() not in (1, 2):
            raise ValueError(
                "Expected predictions of shape (records,) or (records, outputs), got "
                f"{tuple(predictions.shape[1:])} for each record."
            )
        return super()._checked(predictions, targets)

    def _computed(self, xp: Arrays, predictions: Array, targets: Array) -> tuple[Array, Array]:
        outputs = math.prod(predictions.shape[1:])
        columns = (array.reshape(-1, outputs).T for array in (predictions, targets))
        values, gradients = scalar.squared_error(xp, *columns, **self._settings)
        return values, gradients.T.reshape(predictions.shape)


_LOSSES: dict[str, tuple[Callable[..., nn.Module], Callable[..., nn.Module]]] = {
    "softmax_cross_entropy": (nn.CrossEntropyLoss, EnvelopeCrossEntropyLoss),
    "logistic": (nn.BCEWithLogitsLoss, EnvelopeBCEWithLogitsLoss),
    # Half the square.
    "squared_error": (lambda: nn.HuberLoss(delta=1e6), EnvelopeSquaredErrorLoss),
}


def recommended_criterion(candidate: Candidate) -> nn.Module:
    """Returns the loss to train a run of `hidden_state_accountants.recommend` with.

    Its plain form where the optimizer clips (composition), its envelope where nothing may expand.
    With `candidate.make_private_arguments()` and the batch size and learning rate of its event that
    is the whole run.
    """
    plain, enveloped = _LOSSES[candidate.loss]
    if candidate.smoothing is None:
        return plain()
    return enveloped(clip_norm=candidate.clip_norm, smoothing=candidate.smoothing)
