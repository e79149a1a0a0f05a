"""One mistake in the engine."""

from __future__ import annotations

import attrs


@attrs.frozen
class Mutation:
    """One mistake.

    Attributes:
        name: Says what is wrong in the mutant.
        path: The file, below hidden_state_accountants/ (../adapters/... in an adapter).
        old: The passage that is replaced.
        new: What replaces it.
        test: The test file, or the test in it, that notices it, below tests/.
    """

    name: str
    path: str
    old: str
    new: str
    test: str
