"""Private federated matrix factorisation M ~ X Y >= 0: split by users, and split by items.

The horizontal setting of Chen & Liu 2025 (arXiv 2407.08233, Algorithm 3): a user's ratings M_i and
factors X_i are the user's own, Y belongs to everyone. A record is a user with all ratings.

* In every epoch each user fits X_i to the present Y and sends a gradient for Y, clipped to C; noise
  is added to the sum, and Y is published. Given the published past one user moves a sum by at most
  2 C, whatever the factors are, so that the epochs compose.
* X_i stays with its user: it has no noise, and costs nothing. Were every X_i published as well,
  with noise of its own, the costs would be max_i(X_i) + Y: what is about user i enters the factors
  of others through Y alone. That is two blocks per user, composed.
* The vertical setting is the same with rows and columns exchanged (--setting vertical): a node
  keeps the ratings M^j of an item by all users, and its factors Y_j; X belongs to everyone, and a
  record is an item with all its ratings. It protects items and not users: the ratings of one user
  are at all nodes, and move every Y_j. Users are protected where they are the records.
* The paper adds up hidden-state losses of X and Y instead. That is false in general, because the
  blocks move each other (docs/papers/block_coordinate.md).

    python examples/factorisation_by_users.py [--setting vertical]
"""

from __future__ import annotations

import argparse
import math

import attrs
import numpy as np

import hidden_state_accountants as hsa

DELTA, RANK = 1e-5, 10
# For rows of norm 1 at most; chosen on other synthetic data.
STEPS = {"horizontal": (300.0, 0.003), "vertical": (3000.0, 0.0003)}
RELATION = "replace_one"


def ratings(users: int, items: int, setting: str, rng: np.random.Generator) -> np.ndarray:
    """Synthetic data like the paper's, a record in each row; rows are at most 1 long."""
    matrix = rng.random((users, RANK)) @ rng.random((RANK, items))
    matrix = matrix if setting == "horizontal" else matrix.T
    return matrix / np.linalg.norm(matrix, axis=1).max()


def fitted(matrix: np.ndarray, shared: np.ndarray, steps: int = 50) -> np.ndarray:
    """Every record's own factors: projected gradient steps on |X_i Y - M_i|^2, from 0."""
    square = shared @ shared.T
    own = np.zeros((len(matrix), len(shared)))
    for _ in range(steps):
        slope = own @ square - matrix @ shared.T
        own = np.maximum(own - slope / np.linalg.norm(square, 2), 0.0)
    return own


def factorise(matrix: np.ndarray, event: hsa.BlockCoordinateDpEvent, seed: int) -> np.ndarray:
    """The shared factors after the last epoch of the run that the event describes."""
    rng = np.random.default_rng(seed)
    shared = rng.random((RANK, matrix.shape[1]))
    noise_std = math.sqrt(2 * event.step_size * float(event.noise_variance))
    for _ in range(event.num_epochs):
        own = fitted(matrix, shared)
        left = own @ shared - matrix
        lengths = np.linalg.norm(own, axis=1) * np.linalg.norm(left, axis=1)  # of own_i^T left_i
        factors = np.minimum(1.0, event.clip_norm / np.maximum(lengths, 1e-300))
        mean = (own * factors[:, None]).T @ left / event.batch_size
        noise = noise_std * rng.normal(size=shared.shape)
        shared = np.maximum(shared - event.step_size * mean + noise, 0.0)
    return shared


def relative_error(matrix: np.ndarray, shared: np.ndarray) -> float:
    """Of the records' best own factors."""
    return float(np.linalg.norm(fitted(matrix, shared) @ shared - matrix) / np.linalg.norm(matrix))


def main() -> None:
    """Errors without noise and at a few epsilons, and what publishing all factors would add."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--setting", choices=sorted(STEPS), default="horizontal")
    parser.add_argument("--users", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=30)
    arguments = parser.parse_args()
    matrix = ratings(arguments.users, 200, arguments.setting, np.random.default_rng(1))
    records, columns = matrix.shape
    rate, clip = STEPS[arguments.setting]
    level, shared, own = (
        ("user", "Y", "X_i") if arguments.setting == "horizontal" else ("item", "X", "Y_j")
    )
    run = hsa.BlockCoordinateDpEvent(
        step_size=rate,
        noise_variance=0.0,
        clip_norm=clip,
        batch_size=records,
        dataset_size=records,
        num_epochs=arguments.epochs,
    )
    start = np.random.default_rng(0).random((RANK, columns))
    print(f"relative error at the start {relative_error(matrix, start):.3f}")
    print(f"without noise {relative_error(matrix, factorise(matrix, run, 0)):.3f}")
    for epsilon in (8.0, 2.0, 0.5):
        variance = hsa.calibrate_noise(epsilon, DELTA, run, neighboring_relation=RELATION)
        private = attrs.evolve(run, noise_variance=variance)
        error = relative_error(matrix, factorise(matrix, private, 0))
        both = attrs.evolve(private, num_blocks=2)
        cost = hsa.BlockCoordinateAccountant(RELATION).compose(both).get_epsilon(DELTA)
        print(
            f"{shared} at {level}-level epsilon {epsilon:g} (delta {DELTA:g}): relative error "
            f"{error:.3f}; with every {own} published at the same noise over sensitivity epsilon "
            f"{cost:.2f}"
        )


if __name__ == "__main__":
    main()
