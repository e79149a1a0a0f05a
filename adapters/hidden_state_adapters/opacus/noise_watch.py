"""Where the noise comes from."""

from __future__ import annotations

import hashlib

import torch

from hidden_state_accountants import UnsupportedRunError


class NoiseWatch:
    """Notices noise that was used before: the theorems add independent noise in every step.

    Keeps a short hash of the state that the generator had before every step: a generator that is
    seeded again comes back to an old state. The hashes stay in this process, because with them a
    weak seed could be guessed; so a script that seeds, stops and resumes elsewhere is not noticed.
    """

    def __init__(self) -> None:
        self._seen: set[int] = set()

    def draw(self, generator: torch.Generator | None, device: torch.device) -> None:
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
