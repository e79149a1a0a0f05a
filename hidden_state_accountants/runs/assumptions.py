"""What the user of every adapter declares, once for all of them."""

from __future__ import annotations

from hidden_state_accountants.guarantee import Assumption

ONE_EXAMPLE = Assumption.declared(
    "one record = one example, no view, window or augmentation of it a second time, no mixing of "
    "two records"
)
PUBLIC_CALLS = Assumption.declared(
    "only the public calls touch the run: nothing writes model, records, generators or private "
    "attributes behind it"
)
OWN_FUNCTIONS = Assumption.declared(
    "functions, layers and generators that you pass do what they say, in every step"
)
CHOICES = Assumption.declared(
    "hyper-parameters, initial weights, frozen layers, order of the records and number of steps do "
    "not depend on the records: nothing was tuned on them, and no weights were trained on them "
    "before, unless by the runs that are composed here"
)
OF_EVERY_RUN = (ONE_EXAMPLE, PUBLIC_CALLS, OWN_FUNCTIONS, CHOICES)
"""The lines that the guarantee of every training run lists, beside those of its bound."""
