"""A private linear head on features in memory: one call, no loader and no loop."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import torch
from dp_accounting import NeighboringRelation
from torch import Tensor, nn
from torch.nn import functional

from hidden_state_accountants import Assumption, Guarantee, validate
from hidden_state_accountants.guarantee import Topic
from hidden_state_accountants.losses.linear import BY_NAME
from hidden_state_adapters import whitening
from hidden_state_adapters.opacus.losses import TORCH
from hidden_state_adapters.own_noise import OwnGenerator
from hidden_state_adapters.recipe import (
    INTERCEPT_SHARE,
    Recipe,
    Target,
    check_public_features,
    middle_and_half,
    progress,
    shrunk,
)
from hidden_state_adapters.temperature import clipped_losses

_ROUNDING = 0.01  # of feature_norm: half precision rounds a norm by less
_LEAST_SPREAD = 0.1  # of feature_norm, that centred records may be divided by
_SHORTEST = 1e-30
_BLOCK = 2**18  # numbers of the features that are worked on at once: they fit into a cache


def fit_head(
    features: Tensor,
    targets: Tensor,
    *,
    epsilon: float,
    delta: float,
    classes: int | None,
    target_bounds: tuple[float, float] | None = None,
    feature_norm: float = 1.0,
    public_features: Tensor | None = None,
    neighboring_relation: NeighboringRelation | str = NeighboringRelation.REPLACE_SPECIAL,
    calibrate: bool = True,
    verbose: bool = False,
) -> tuple[nn.Linear, Guarantee]:
    """Trains a linear head that is (epsilon, delta)-differentially private.

        features = nn.functional.normalize(backbone(images))    # once, frozen
        head, guarantee = fit_head(features, labels, epsilon=1.0, delta=1e-5, classes=10)
        head(nn.functional.normalize(backbone(others))).argmax(dim=1)
        print(guarantee.explain())

    Nothing has to be tuned: the run is that of `hidden_state_adapters.sklearn.PrivateClassifier`,
    64 steps on all records with momentum along the noisy gradients. The features are whitened
    first: by those of `public_features`, at no cost, or, of classes, by a mean and a covariance
    that are released with noise; where noise leaves nothing of a covariance, or it looks like one
    of raw pixels, they are centred.

    Formal guarantees: the head is (epsilon, delta)-differentially private under
    `neighboring_relation` if the assumptions of the guarantee hold. The number of records, the
    number of classes and the other arguments are public. Every call spends epsilon anew:
    `hidden_state_accountants.budget` adds up. The noise cannot be seeded.

    Args:
        features: Shape (records, columns), floating point, on any device that has float64: of
            norm `feature_norm`, each record by itself. They are neither copied nor changed.
        targets: Class indices, shape (records,); numbers if `classes` is None.
        epsilon: Target, met from below.
        delta: Where epsilon is met.
        classes: Their number, at least 2; None for the squared error.
        target_bounds: (low, high) of the numbers, from public knowledge; longer ones are cut.
        feature_norm: The norm of every record.
        public_features: Features of public data that look like the records, by the same network,
            of norm `feature_norm`; about as many as columns, or more. Nothing of them is protected.
        neighboring_relation: REPLACE_SPECIAL (a record is replaced by one without gradient) or
            REPLACE_ONE.
        calibrate: True to divide the outputs by one temperature, released with noise and
            accounted, so that their softmax is a probability (a public temperature where its noise
            exceeds its use).
        verbose: True to print progress.

    Returns:
        The head, with `classes` outputs (1 for the squared error, in units of the targets), in the
        type and on the device of the features, for features of norm `feature_norm`; and what is
        proved of it.

    Raises:
        TypeError, ValueError: An argument has an impossible value. Nothing was trained.
        UnsupportedRunError: A gradient was not finite, and the call counts as spent.
    """
    _check_matrix("features", features)
    feature_norm = validate.real("feature_norm", feature_norm, above=0)
    target = Target.of(epsilon, delta, neighboring_relation)
    constant, shape = INTERCEPT_SHARE * feature_norm, (len(features), features.shape[1])
    rows = _Rows.of(features.detach(), feature_norm, constant)
    public = None
    if public_features is not None:
        _check_matrix("public_features", public_features)
        same = public_features.shape == features.shape and torch.equal(public_features, features)
        check_public_features(tuple(public_features.shape), shape[1], same)
        public = _Rows.of(public_features.detach().to(features.device), feature_norm, 0.0)
    if classes is None:
        outputs, (middle, half) = 1, middle_and_half(target_bounds)
        wanted = ((_targets(targets, features).double() - middle) / half).clamp(-1.0, 1.0)
        options: dict[str, Any] = {"loss": "squared_error"}
    else:
        classes = validate.integer("classes", classes, minimum=2)
        wanted, outputs = _labels(targets, features, classes), 1 if classes == 2 else classes
        options = {"classes": classes}
    releases = classes is not None and public is None
    recipe = Recipe.of(
        target,
        shape,
        feature_norm,
        constant,
        releases and target.centring_pays(*shape),
        classes is not None and calibrate,
        releases and target.whitening_pays(*shape),
        **options,
    )
    recipe.spend()
    generator = OwnGenerator()
    if public is not None:
        public = public.centred(0.0, generator).whitened(0.0, generator)
        rows = attrs.evolve(rows, means=public.means, whitening=public.whitening).rescaled()
    if recipe.statistics is not None:
        rows = rows.centred(recipe.statistics.noise_multiplier, generator)
    if recipe.covariance is not None:
        rows = rows.whitened(recipe.covariance_std, generator)
    clip_norm = float(recipe.run.event.per_step("clip_norm")[0])

    def summed(weights: np.ndarray) -> np.ndarray:
        return rows.gradient_sum(recipe.run.loss, clip_norm, wanted, weights)

    tell = progress("fit_head", recipe.run, verbose)
    weights = recipe.train(summed, (shape[1] + 1, outputs), generator, tell)
    if classes is None:
        head = rows.head(half * weights, middle)
    else:
        if calibrate:
            losses = rows.clipped_losses
            weights = weights * recipe.scale(lambda: losses(wanted, weights), classes, generator)
        # One logit is the difference of two.
        head = rows.head(weights * [-0.5, 0.5] if outputs == 1 else weights)
    known = f"the {classes} classes" if classes else f"the bounds of the targets, {target_bounds!r}"
    return head, recipe.guarantee(*_assumptions(recipe, known, public))


def _assumptions(recipe: Recipe, known: str, public: _Rows | None) -> list[Assumption]:
    found = [
        Assumption.declared(
            "the arguments do not depend on the records: no search over them on these records",
            Topic.HYPER_PARAMETERS,
        ),
        Assumption.declared(
            "the features of a record are a function of it alone, by a network that did not see "
            "these records (in evaluation mode)"
        ),
        Assumption.public(known),
    ]
    if public is not None:
        count = len(public.features)
        text = f"{count} features that whiten: epsilon protects nobody in them"
        found.append(Assumption.public(text))
    if recipe.statistics is not None:
        found.append(recipe.released("the mean of the features was"))
    return found


@attrs.frozen(eq=False)
class _Rows:
    """Features, each brought to its norm by itself, with a constant for the intercept.

    Attributes:
        features: Features as they were passed.
        means: Subtracted mean, float64.
        scales: Factors that rows are multiplied with then, float64.
        norm: Norm of a row then; rows of zeros stay.
        constant: Entry that is appended.
        whitening: Matrix that is multiplied with before, float64; None for the identity.
    """

    features: Tensor
    means: Tensor
    scales: Tensor
    norm: float
    constant: float
    whitening: Tensor | None = None

    @classmethod
    def of(cls, features: Tensor, norm: float, constant: float) -> _Rows:
        """Returns rows that are at their norm up to rounding; raises ValueError for others."""
        zeros = features.new_zeros(features.shape[1], dtype=torch.float64)
        rows = cls(features, zeros, zeros.new_ones(len(features)), norm, constant)
        norms = rows._lengths()
        wrong = ~((norms - norm).abs() <= _ROUNDING * norm) & ~(norms <= _SHORTEST)
        if wrong.any():
            raise ValueError(
                f"Expected features of norm feature_norm = {norm:g}, got one of norm "
                f"{float(norms[wrong][0]):g}. Normalise every record by itself, for training and "
                "for predictions: torch.nn.functional.normalize(features)."
            )
        return attrs.evolve(rows, scales=_scales(norms, norm))

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yields the features in float64, in parts that fit into memory."""
        size = max(1, _BLOCK // self.features.shape[1])
        for first in range(0, len(self.features), size):
            index = slice(first, first + size)
            yield index, self.features[index].double()

    def _lengths(self) -> Tensor:
        return torch.cat([self._moved(block).norm(dim=1) for _, block in self.blocks()])

    def _moved(self, block: Tensor) -> Tensor:
        moved = block - self.means
        return moved if self.whitening is None else moved @ self.whitening

    def centred(self, noise_multiplier: float, generator: OwnGenerator) -> _Rows:
        """Returns rows from which a noisy mean is subtracted, again of the norm.

        Formal guarantees: `GaussianDpEvent(noise_multiplier)`: a row moves the sum by at most its
            norm.
        """
        total = torch.zeros_like(self.means)
        for index, block in self.blocks():
            total += self.scales[index] @ block
        std, n = noise_multiplier * self.norm, len(self.features)
        noisy = (total.cpu().numpy() + generator.normal(std, tuple(total.shape))) / n
        means = torch.from_numpy(shrunk(noisy, std / n)).to(total.device)
        return attrs.evolve(self, means=means).rescaled()

    def whitened(self, std: float, generator: OwnGenerator) -> _Rows:
        """Returns centred rows, whitened by a noisy sum of their moments where that pays, of the
        norm.

        Formal guarantees: those of `noisy_moment` with noise of this std; rows have norm 1 in the
            sum.
        """
        columns = len(self.means)
        total = self.means.new_zeros((columns, columns))
        for index, block in self.blocks():
            unit = (block - self.means) * (self.scales[index][:, None] / self.norm)
            total += unit.T @ unit
        n = len(self.features)
        moment = whitening.noisy_moment(total.cpu().numpy(), std, generator.normal) / n
        if std and not whitening.directions_are_few(moment, std / n):
            return self
        found = whitening.whitening(moment, whitening.noise_length(std, columns) / n)
        return attrs.evolve(self, whitening=torch.from_numpy(found).to(total.device)).rescaled()

    def rescaled(self) -> _Rows:
        """Returns rows again of the norm, after they were moved."""
        return attrs.evolve(self, scales=_scales(self._lengths(), self.norm))

    def gradient_sum(
        self, loss: str, clip_norm: float, targets: Tensor, weights: np.ndarray
    ) -> np.ndarray:
        """Returns the sum of the clipped gradients, of the shape of the weights.

        In float64: rounding of a long sum in float32 moves it by more than a record may.
        """
        w = torch.from_numpy(weights).to(self.means.device)
        total, longest = torch.zeros_like(w), math.hypot(self.norm, self.constant)
        known = BY_NAME[loss](TORCH, w.shape[1])
        for index, block, z in self._predictions(w):
            scales, y = self.scales[index][:, None], targets[index]
            rows = functional.one_hot(y, z.shape[1]) if z.shape[1] > 1 else y[:, None]
            slopes = known.slopes(z, rows)
            # The gradient is an outer product: its norm is that of slopes times that of the row.
            norms = slopes.norm(dim=1, keepdim=True).clamp(min=_SHORTEST) * longest
            slopes *= (clip_norm / norms).clamp(max=1.0)
            total[-1] += self.constant * slopes.sum(dim=0)
            slopes *= scales
            # (slopes^T block)^T: five times as fast as block^T slopes.
            total[:-1] += (slopes.T @ block).T - torch.outer(self.means, slopes.sum(dim=0))
        total[:-1] = self._unwhitened(total[:-1])  # a symmetric map
        return total.cpu().numpy()

    def _predictions(self, w: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Yields the blocks, with what is predicted for them."""
        slopes = self._unwhitened(w[:-1])  # once: of many columns it takes as long as all blocks
        for index, block in self.blocks():
            z = (block @ slopes - self.means @ slopes) * self.scales[index][:, None]
            yield index, block, z + self.constant * w[-1]

    def _unwhitened(self, slopes: Tensor) -> Tensor:
        """Returns slopes on centred features, from those on whitened ones."""
        return slopes if self.whitening is None else self.whitening @ slopes

    def clipped_losses(self, labels: Tensor, weights: np.ndarray) -> np.ndarray:
        """Returns the sums that the temperature is found from."""
        w, found = torch.from_numpy(weights).to(self.means.device), np.zeros(4)
        for index, _, z in self._predictions(w):
            found += clipped_losses(z.cpu().numpy(), labels[index].long().cpu().numpy())
        return found

    def head(self, weights: np.ndarray, offset: float = 0.0) -> nn.Linear:
        """Returns the layer on features as they were passed.

        Centred rows were brought to the norm one by one. A layer cannot do that: it divides by the
        root of their mean square, which is public once the mean is; whitening keeps that.
        """
        w = torch.from_numpy(weights).to(self.means.device)
        square = float(self.means @ self.means)
        spread = math.sqrt(max(self.norm**2 - square, (_LEAST_SPREAD * self.norm) ** 2))
        slopes = self._unwhitened(w[:-1]).T * (self.norm / spread)
        head = nn.utils.skip_init(
            nn.Linear,
            *reversed(slopes.shape),
            device=self.features.device,
            dtype=self.features.dtype,
        )
        with torch.no_grad():
            head.weight.copy_(slopes)
            head.bias.copy_(self.constant * w[-1] - slopes @ self.means + offset)
        return head


def _scales(norms: Tensor, norm: float) -> Tensor:
    """Returns what rows are multiplied with to have the norm; rows of zeros stay."""
    return torch.where(norms > _SHORTEST, norm / norms.clamp(min=_SHORTEST), 0.0)


def _check_matrix(name: str, features: Any) -> None:
    if not isinstance(features, Tensor) or not features.is_floating_point():
        kind = features.dtype if isinstance(features, Tensor) else type(features).__name__
        raise TypeError(f"Expected {name} as a floating point tensor, got {kind}.")
    if features.dim() != 2 or len(features) < 2 or not features.shape[1]:
        raise ValueError(
            f"Expected {name} of shape (records, columns), got {tuple(features.shape)}."
        )


def _targets(targets: Tensor, features: Tensor) -> Tensor:
    if targets.shape != features.shape[:1]:
        raise ValueError(
            f"Expected targets of shape ({len(features)},), got {tuple(targets.shape)}."
        )
    return targets.detach().to(features.device)


def _labels(targets: Tensor, features: Tensor, classes: int) -> Tensor:
    labels = _targets(targets, features)
    if labels.is_floating_point():
        raise TypeError(
            "Expected class indices as integers, got floating point numbers. For numbers as "
            "targets pass classes=None and target_bounds."
        )
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise ValueError(
            f"Expected class indices from 0 to {classes - 1}, got {low if low < 0 else high}. "
            "Pass classes=, the number of all classes that there can be."
        )
    return labels.long()
