"""Geometry of the per-example loss: where the contraction of an update comes from."""

from __future__ import annotations

import enum
import math
from typing import Any

import attrs
from dp_accounting import dp_event

from hidden_state_accountants import validate


class LossKind(enum.Enum):
    """The classes of per-example losses that the theorems distinguish."""

    CONVEX = "convex"
    STRONGLY_CONVEX = "strongly_convex"
    WEAKLY_CONVEX = "weakly_convex"
    SMOOTH = "smooth"
    HOELDER = "hoelder"
    LINEAR = "linear"
    GENERALIZED_LINEAR = "generalized_linear"


_CONVEX = (LossKind.CONVEX, LossKind.STRONGLY_CONVEX, LossKind.GENERALIZED_LINEAR)
_AT_LEAST_0 = validate.checked(validate.real, minimum=0)


def _kind(value: Any) -> LossKind:
    return validate.member(LossKind, "kind", value)


@attrs.frozen(kw_only=True, repr=False)
class LossGeometry:
    """Curvature and gradient bound of EVERY per-example loss on the domain of the parameters.

    Use the class methods. The constants are the user's word: they must hold for every record that
    the data could hold, not only for the records that it does hold, with class weights, temperature
    and augmentation included, and without the weight decay of the optimizer.

    Attributes:
        kind: The class of losses.
        smoothness: M, the Lipschitz constant of the per-example gradient. For `hoelder` the
            constant L of |grad f(x) - grad f(y)| <= L |x - y|**exponent.
        strong_convexity: mu >= 0; used where clipping never acts.
        weak_convexity: m >= 0; the Hessian is at least -m.
        exponent: The Hölder exponent in (0, 1]; 1 for every other kind.
        lipschitz: A bound on the norm of the per-example gradient (before clipping), or None. With
            ``lipschitz <= clip_norm`` clipping never acts.
    """

    kind: LossKind = attrs.field(converter=_kind)
    smoothness: float = attrs.field(
        validator=validate.checked(validate.real, minimum=0, maximum=validate.LARGEST)
    )
    strong_convexity: float = attrs.field(default=0.0, validator=_AT_LEAST_0)
    weak_convexity: float = attrs.field(default=0.0, validator=_AT_LEAST_0)
    exponent: float = attrs.field(
        default=1.0, validator=validate.checked(validate.real, above=0, maximum=1)
    )
    lipschitz: float | None = attrs.field(default=None, validator=validate.MAGNITUDE)

    def __attrs_post_init__(self) -> None:
        kind, strong, weak = self.kind, self.strong_convexity, self.weak_convexity
        bends = self.smoothness > 0 or self.lipschitz is None
        for is_wrong, wanted in (
            (strong > self.smoothness, "strong_convexity <= smoothness"),
            (strong and kind is not LossKind.STRONGLY_CONVEX, "strong_convexity = 0"),
            (weak and kind not in (LossKind.WEAKLY_CONVEX, LossKind.SMOOTH), "weak_convexity = 0"),
            (kind is LossKind.SMOOTH and weak != self.smoothness, "weak_convexity = smoothness"),
            (self.exponent != 1 and kind is not LossKind.HOELDER, "exponent = 1"),
            (kind is LossKind.LINEAR and bends, "smoothness = 0 and a lipschitz constant"),
        ):
            if is_wrong:
                raise ValueError(
                    f"Expected {wanted} for a {kind.value} loss, got {attrs.asdict(self)}. Use a "
                    "class method of LossGeometry."
                )

    @property
    def is_convex(self) -> bool:
        """True if every loss is convex in all parameters together."""
        if self.kind is LossKind.WEAKLY_CONVEX:
            return self.weak_convexity == 0
        return self.kind in (*_CONVEX, LossKind.LINEAR)

    @classmethod
    def convex(cls, smoothness: float, lipschitz: float | None = None) -> LossGeometry:
        """Convex with an M-Lipschitz gradient."""
        return cls(kind=LossKind.CONVEX, smoothness=smoothness, lipschitz=lipschitz)

    @classmethod
    def strongly_convex(
        cls, smoothness: float, strong_convexity: float, lipschitz: float | None = None
    ) -> LossGeometry:
        """mu-strongly convex with an M-Lipschitz gradient.

        The strong convexity helps only where clipping never acts: two clipped gradients can be
        equal. Such a loss is Lipschitz only on a bounded domain.
        """
        return cls(
            kind=LossKind.STRONGLY_CONVEX,
            smoothness=smoothness,
            strong_convexity=validate.real("strong_convexity", strong_convexity, above=0),
            lipschitz=lipschitz,
        )

    @classmethod
    def weakly_convex(
        cls, smoothness: float, weak_convexity: float, lipschitz: float | None = None
    ) -> LossGeometry:
        """Hessian between -m and M."""
        return cls(
            kind=LossKind.WEAKLY_CONVEX,
            smoothness=smoothness,
            weak_convexity=weak_convexity,
            lipschitz=lipschitz,
        )

    @classmethod
    def smooth(cls, smoothness: float, lipschitz: float | None = None) -> LossGeometry:
        """M-Lipschitz gradient and nothing else: weakly convex with m = M."""
        return cls(
            kind=LossKind.SMOOTH,
            smoothness=smoothness,
            weak_convexity=smoothness,
            lipschitz=lipschitz,
        )

    @classmethod
    def hoelder(
        cls, constant: float, exponent: float, lipschitz: float | None = None
    ) -> LossGeometry:
        """|grad f(x) - grad f(y)| <= constant * |x - y|**exponent, exponent in (0, 1]."""
        return cls(
            kind=LossKind.HOELDER, smoothness=constant, exponent=exponent, lipschitz=lipschitz
        )

    @classmethod
    def linear(cls, lipschitz: float) -> LossGeometry:
        """Affine in the parameters, gradient norm at most `lipschitz`."""
        return cls(kind=LossKind.LINEAR, smoothness=0.0, lipschitz=lipschitz)

    @classmethod
    def generalized_linear(cls, smoothness: float, lipschitz: float | None = None) -> LossGeometry:
        """Convex function of ONE scalar prediction that is affine in the parameters.

        (Or the squared error of several such predictions, equally weighted: docs/theory/moduli.md.)
        Keeps the unclipped modulus under clipping (theory, clipped generalized linear model), if
        all parameters are clipped together as one vector, one record per clipped unit: not for
        micro-batches, several augmentations of a record, other losses of several outputs, or
        per-layer clipping.
        `smoothness` must be at least loss''(z) * |features|**2 for every record.
        """
        return cls(kind=LossKind.GENERALIZED_LINEAR, smoothness=smoothness, lipschitz=lipschitz)

    @classmethod
    def logistic(cls, feature_norm: float, bias: bool = False) -> LossGeometry:
        """Binary cross-entropy of one logit; M = B**2/4, gradient norm at most B.

        Args:
            feature_norm: B, a bound on the L2 norm of every record's features.
            bias: True if a bias is trained as well (B**2 becomes B**2 + 1).
        """
        square = square_norm(feature_norm, bias)
        return cls.generalized_linear(square / 4, math.sqrt(square))

    @classmethod
    def softmax_cross_entropy(cls, feature_norm: float, bias: bool = False) -> LossGeometry:
        """Softmax cross-entropy of a linear model; M = B**2/2, gradient norm at most sqrt(2)*B.

        Any number of classes; the targets may be probabilities. See `logistic` for the arguments.
        """
        square = square_norm(feature_norm, bias)
        return cls.convex(square / 2, math.sqrt(2 * square))

    @classmethod
    def squared_error(
        cls, feature_norm: float, bias: bool = False, *, scale: float = 1.0
    ) -> LossGeometry:
        """(scale/2) * |prediction - target|**2 of any outputs; M = scale * B**2, not Lipschitz.

        Args:
            feature_norm: B, a bound on the L2 norm of every record's features.
            bias: True if a bias is trained as well (B**2 becomes B**2 + 1).
            scale: 1 for half the squared error; 2/K for torch.nn.MSELoss with K outputs, whose
                mean is over the outputs, too.
        """
        square = square_norm(feature_norm, bias)
        return cls.generalized_linear(validate.real("scale", scale, above=0) * square)

    @classmethod
    def huber(cls, feature_norm: float, threshold: float, bias: bool = False) -> LossGeometry:
        """Huber loss of one output; M = B**2, gradient norm at most threshold*B.

        Args:
            feature_norm: B, a bound on the L2 norm of every record's features.
            threshold: The residual at which the loss turns linear (torch.nn.HuberLoss: delta).
            bias: True if a bias is trained as well (B**2 becomes B**2 + 1).
        """
        square = square_norm(feature_norm, bias)
        threshold = validate.real("threshold", threshold, above=0)
        return cls.generalized_linear(square, threshold * math.sqrt(square))

    @classmethod
    def envelope_softmax_cross_entropy(
        cls, feature_norm: float, bias: bool = False, *, clip_norm: float, smoothing: float = 0.0
    ) -> LossGeometry:
        """The envelope of softmax cross-entropy; M = B**2/(2 + smoothing), gradient norm C*B.

        The envelope of a loss is convex and has no gradient longer than clip_norm in the logits,
        so that a clip norm of at least C*B in the parameters never acts: docs/theory/moduli.md.
        `hidden_state_accountants.envelope_smoothing` chooses the smoothing for a learning rate.

        Args:
            feature_norm: B, a bound on the L2 norm of every record's features.
            bias: True if a bias is trained as well (B**2 becomes B**2 + 1).
            clip_norm: C, of the loss; at most sqrt(2) matters here.
            smoothing: m >= 0.
        """
        bounds = _envelope(feature_norm, bias, 2.0, clip_norm, smoothing, math.sqrt(2))
        return cls.convex(*bounds)

    @classmethod
    def envelope_logistic(
        cls, feature_norm: float, bias: bool = False, *, clip_norm: float, smoothing: float = 0.0
    ) -> LossGeometry:
        """The envelope of binary cross-entropy; M = B**2/(4 + smoothing), gradient norm C*B.

        See `envelope_softmax_cross_entropy`; at most a clip norm of 1 matters here.
        """
        bounds = _envelope(feature_norm, bias, 4.0, clip_norm, smoothing, 1.0)
        return cls.generalized_linear(*bounds)

    @classmethod
    def envelope_hinge(
        cls, feature_norm: float, bias: bool = False, *, clip_norm: float, smoothing: float
    ) -> LossGeometry:
        """The envelope of the hinge loss; M = B**2/smoothing, gradient norm C*B.

        See `envelope_softmax_cross_entropy`; at most a clip norm of 1 matters here.
        """
        smoothing = validate.magnitude("smoothing", smoothing, positive=True)
        bounds = _envelope(feature_norm, bias, 0.0, clip_norm, smoothing, 1.0)
        return cls.generalized_linear(*bounds)

    @classmethod
    def envelope_squared_error(
        cls,
        feature_norm: float,
        bias: bool = False,
        *,
        clip_norm: float,
        smoothing: float = 0.0,
        scale: float = 1.0,
    ) -> LossGeometry:
        """The envelope of (scale/2) |prediction - target|**2, of any number of outputs.

        M = B**2/(1/scale + smoothing), gradient norm C*B. See `envelope_softmax_cross_entropy`.
        """
        inverse = 1 / validate.real("scale", scale, above=0)
        return cls.convex(*_envelope(feature_norm, bias, inverse, clip_norm, smoothing, math.inf))

    def __repr__(self) -> str:
        """The call of the class method; what is 0 or None by default is left out."""
        constant = "constant" if self.kind is LossKind.HOELDER else "smoothness"
        named = {
            constant: None if self.kind is LossKind.LINEAR else self.smoothness,
            "strong_convexity": self.strong_convexity or None,
            "weak_convexity": self.weak_convexity if self.kind is LossKind.WEAKLY_CONVEX else None,
            "exponent": self.exponent if self.kind is LossKind.HOELDER else None,
            "lipschitz": self.lipschitz,
        }
        given = (f"{name}={value!r}" for name, value in named.items() if value is not None)
        return f"LossGeometry.{self.kind.value}({', '.join(given)})"

    # dp_accounting serialises the parts of an event with the method of the same name.
    to_named_tuple = dp_event.DpEvent.to_named_tuple


def square_norm(feature_norm: float, bias: bool) -> float:
    """The largest square of the norm of a record's features, with a 1 appended for a bias."""
    bias = validate.flag("bias", bias)
    norm = validate.real("feature_norm", feature_norm, above=0)
    return norm * norm + (1.0 if bias else 0.0)


def _envelope(
    feature_norm: float,
    bias: bool,
    inverse_curvature: float,
    clip_norm: float,
    smoothing: float,
    longest: float,
) -> tuple[float, float]:
    """Smoothness and gradient bound of an envelope of a loss with gradients up to `longest`."""
    square = square_norm(feature_norm, bias)
    smoothing = validate.magnitude("smoothing", smoothing)
    clip_norm = min(validate.magnitude("clip_norm", clip_norm, positive=True), longest)
    return square / (inverse_curvature + smoothing), clip_norm * math.sqrt(square)
