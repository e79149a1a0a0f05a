"""What an attack shows about Renyi divergences too, for claims that are made in them."""

from collections.abc import Callable

import attrs

from hidden_state_accountants.auditing import Evidence


@attrs.frozen(eq=False)
class RenyiEvidence(Evidence):
    """Evidence with a lower bound on the Renyi divergence of an order > 1."""

    renyi: Callable[[float], float]
