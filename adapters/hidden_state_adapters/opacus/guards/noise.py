"""Where the noise comes from."""

from __future__ import annotations

import hashlib

import torch
from opacus.optimizers import DPOptimizer

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus.guards.base import Guard, Piece, at_step


class NoiseMemory:
    """Which states of noise generators gave noise already; over all runs of an engine.

    Keeps a short hash of the state that the generator had before every step: a generator that is
    seeded again comes back to an old state. With the hashes a weak seed could be guessed, so they
    leave the process with the private state of a checkpoint only: a script that seeds, stops and
    resumes elsewhere without that is not noticed.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def private_state(self) -> torch.Tensor:
        """The hashes so far, shape (steps,). Secret."""
        return torch.tensor(sorted(self._seen), dtype=torch.int64)

    def load_private_state(self, state: torch.Tensor) -> None:
        """Adds what `private_state` returned."""
        self._seen.update(state.tolist())

    def note(self, generator: torch.Generator | None, device: torch.device) -> None:
        """Notes that noise is about to be drawn.

        Raises:
            UnsupportedRunError: The generator is in a state that already gave noise.
        """
        if generator is not None:
            state = generator.get_state()
        elif device.type == "cuda":
            state = torch.cuda.get_rng_state(device)
        else:
            state = torch.get_rng_state()
        digest = hashlib.sha256(state.numpy().tobytes()).digest()[:8]
        key = int.from_bytes(digest, "big", signed=True)
        if key in self._seen:
            raise UnsupportedRunError(
                "the noise generator is in a state that gave the noise of an earlier step, so the "
                "noise would repeat and cancel. Do not seed during a run; better not at all."
            )
        self._seen.add(key)


class NoiseGuard(Guard):
    """Notices noise that was used before: the theorems add independent noise in every step.

    Args:
        optimizer: The private optimizer.
        memory: What it has to differ from.
    """

    def __init__(self, optimizer: DPOptimizer, memory: NoiseMemory):
        self._optimizer, self._memory = optimizer, memory

    def before_noise(self, piece: Piece) -> None:
        """Raises UnsupportedRunError if the generator is in an old state."""
        optimizer = self._optimizer
        if not optimizer.noise_multiplier or optimizer.secure_mode:
            return  # nothing is drawn; or it comes from the operating system, which has no state
        device = piece.params[0].device
        at_step(piece.step, lambda: self._memory.note(optimizer.generator, device))
