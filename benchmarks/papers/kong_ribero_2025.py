"""Kong & Ribero 2025 (arXiv 2407.05237): Figure 1, with the sound values below it.

python benchmarks/papers/kong_ribero_2025.py
"""

from __future__ import annotations

import pathlib

import numpy as np
import pages
from baselines import amplification_by_iteration
from dp_accounting import NeighboringRelation

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds import (
    Composition,
    KongRibero,
    ShiftedInterpolation,
)

RATE = NOISE = 1e-5
CLIP, BATCH, SIZE = 10.0, 10, 10_000
EPOCH = SIZE // BATCH
SMOOTHNESS = 1000.0  # M: the paper does not state it; only m/(M + m) enters
WEAK = (0.0, 10.0, 1000.0)  # m
RELATION = NeighboringRelation.REPLACE_ONE


def event(steps: int, loss: hsa.LossGeometry, clip: float | None) -> hsa.LastIterateDpEvent:
    """The run of the figure; sigma is the noise on the iterate, eta z C/b."""
    bound = loss.lipschitz if clip is None else clip
    return hsa.LastIterateDpEvent(
        noise_multiplier=NOISE * BATCH / (RATE * bound),
        learning_rate=RATE,
        clip_norm=clip,
        batch_size=BATCH,
        dataset_size=SIZE,
        num_steps=steps,
        batch_order="cyclic",
        loss=loss,
    )


def values(bound, steps, loss, clip) -> list[float]:
    """D_alpha/alpha after every number of steps."""
    return [pages.per_alpha(bound, event(int(t), loss, clip), RELATION) for t in steps]


def weakly_convex(steps: np.ndarray) -> dict[str, list[float]]:
    """The left plot: gradients of norm at most C, so that no clip acts."""
    losses = {
        m: hsa.LossGeometry.weakly_convex(SMOOTHNESS, m, CLIP)
        if m
        else hsa.LossGeometry.convex(SMOOTHNESS, CLIP)
        for m in WEAK
    }
    result = {"composition": values(Composition(), steps, losses[0.0], None)}
    for m, loss in losses.items():
        result[f"(19), m = {m:g}"] = values(KongRibero("published"), steps, loss, None)
    for m, loss in losses.items():
        result[f"Theorem A, m = {m:g}"] = values(ShiftedInterpolation(), steps, loss, None)
    result["amplification by iteration, m = 0"] = [
        amplification_by_iteration(event(int(t), losses[0.0], None), RELATION) for t in steps
    ]
    return result


def convex(steps: np.ndarray) -> dict[str, list[float]]:
    """The right plot: convex losses whose gradients are up to Q long, clipped at C or not."""
    clipped = hsa.LossGeometry.convex(SMOOTHNESS)
    result = {
        "composition, clipped at C": values(Composition(), steps, clipped, CLIP),
        "(17), clipped at C": values(KongRibero("published"), steps, clipped, CLIP),
    }
    # Without a clip the noise is the same and the sensitivity Q in place of C.
    for factor in (1, 10):
        loss = hsa.LossGeometry.convex(SMOOTHNESS, factor * CLIP)
        name = f"amplification by iteration, Q = {factor * CLIP:g}"
        runs = [event(int(t), loss, None) for t in steps]
        result[name] = [amplification_by_iteration(run, RELATION) for run in runs]
    result["Theorem A, clipped at C"] = values(ShiftedInterpolation(), steps, clipped, CLIP)
    return result


def main(folder: pathlib.Path, *, small: bool = False) -> None:
    """Writes the part of the page, and its pictures."""
    last = 2 * EPOCH if small else 100 * EPOCH
    steps = np.unique(np.geomspace(10, last, 4 if small else 25).astype(int))
    left, right = weakly_convex(steps), convex(steps)
    label = "Renyi divergence / alpha"
    pages.draw(
        folder / "kong_ribero_2025.png",
        [
            ("Weakly convex, no clipping", "steps T", label, steps, left),
            ("Convex, gradients up to Q", "steps T", label, steps, right),
        ],
        log_x=True,
        log_y=True,
    )
    points = [int(steps[len(steps) // 2]), last]
    header = ["$D_\\alpha/\\alpha$ after", *map(str, points)]
    pages.write(folder, "kong_ribero_2025", f"""
### Figure 1: bounds against the number of steps

lambda = sigma = 1e-5, C = 10, b = 10, 10,000 records, so that an epoch has 1,000 steps and
s/sigma = 2. The smoothness M is not stated; here M = {SMOOTHNESS:g}.

![Figure 1](kong_ribero_2025.png)

#### No clipping (left)

{pages.table(header, pages.at(steps, left, points))}

#### Convex, clipped (right)

{pages.table(header, pages.at(steps, right, points))}

* (19) is true, and twice too large. Theorem A at m = 0 is amplification by iteration.
* (17) is never below composition: the curve lies on it. With the exact modulus of a clipped convex
  update instead of sqrt(2) nearly all of the amplification comes back.
* The paper's point on the right is true: without a clip the bound grows with the square of the
  longest gradient, Q.
""")  # fmt: skip


if __name__ == "__main__":
    pages.run(main, __doc__)
