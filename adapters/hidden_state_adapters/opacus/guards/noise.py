"""Where the noise comes from."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from opacus.optimizers import DPOptimizer

from hidden_state_accountants import Assumption, UnsupportedRunError
from hidden_state_adapters.opacus.gradients.noise import GIVEN_NOISE, OWN_NOISE, SECURE_NOISE
from hidden_state_adapters.opacus.guards.base import Guard, Piece, at_step


class NoiseMemory:
    """Which states of the user's noise generators gave noise already; over all runs of an engine.

    Keeps a short hash of the state that the generator had at every step: a generator that is seeded
    again comes back to an old state. With the hashes a weak seed could be guessed, so they leave
    the process with the private state of a checkpoint only: a script that seeds, stops and resumes
    elsewhere without that is not noticed.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def private_state(self) -> torch.Tensor:
        """The hashes so far, shape (steps,). Secret."""
        return torch.tensor(sorted(self._seen), dtype=torch.int64)

    def load_private_state(self, state: torch.Tensor) -> None:
        """Adds what `private_state` returned."""
        self._seen.update(state.tolist())

    def note(self, generator: torch.Generator) -> None:
        """Notes the state of a generator; in every step at the same moment.

        Raises:
            UnsupportedRunError: It was in this state in an earlier step.
        """
        digest = hashlib.sha256(generator.get_state().numpy().tobytes()).digest()[:8]
        key = int.from_bytes(digest, "big", signed=True)
        if key in self._seen:
            raise UnsupportedRunError(
                "the noise generator is in a state that gave the noise of an earlier step, so the "
                "noise would repeat and cancel. Do not seed noise_generator during a run, or leave "
                "it out: the noise is then drawn from a generator of its own."
            )
        self._seen.add(key)


def assumption_on_noise(optimizer: DPOptimizer) -> Assumption:
    """Whose generator the noise comes from; None stands for one of our own."""
    if optimizer.generator is None:
        return OWN_NOISE
    return SECURE_NOISE if optimizer.secure_mode else GIVEN_NOISE


class NoiseGuard(Guard):
    """Notices noise that was used before: the theorems add independent noise in every step.

    That can happen with a generator of the user's only. Others have no state that can be set.

    Args:
        optimizer: The private optimizer.
        memory: What it has to differ from.
        is_drawn_here: Whether this process draws the noise, and not another one.
    """

    def __init__(self, optimizer: DPOptimizer, memory: NoiseMemory, *, is_drawn_here: bool = True):
        self._optimizer, self._memory = optimizer, memory
        self._is_drawn_here = is_drawn_here

    @property
    def assumptions(self) -> Iterable[Assumption]:
        """Whose generator it is."""
        yield assumption_on_noise(self._optimizer)

    def before_noise(self, piece: Piece) -> None:
        """Raises UnsupportedRunError if the generator is in an old state."""
        optimizer = self._optimizer
        generator = optimizer.generator
        if (
            not self._is_drawn_here
            or generator is None
            or not optimizer.noise_multiplier
            or optimizer.secure_mode
        ):
            return
        at_step(piece.step, lambda: self._memory.note(generator))
