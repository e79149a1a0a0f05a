"""The table "Declared by you" of docs/threat_model.md, in the words that a guarantee lists."""

from hidden_state_accountants.guarantee import Status

PUBLIC_CALLS = "only the public calls touch the run"
FUNCTIONS = "functions, layers and generators that you pass do what they say"
CHOICES = (
    "hyper-parameters, initial weights, frozen layers, order of the records and number of steps do "
    "not depend on the records"
)
ONE_EXAMPLE = (
    "one record = one example, no view, window or augmentation of it a second time, no mixing of "
    "two records"
)
ONE_PERSON = "one record per person"
PUBLISHED = "nothing computed from the private records besides the released iterates is seen"
OF_EVERY_RUN = (PUBLIC_CALLS, FUNCTIONS, CHOICES, ONE_EXAMPLE, ONE_PERSON, PUBLISHED)
GEOMETRY = "of every record that the data could have"
"""Of a loss geometry that is declared."""
FIXED_RECORDS = (
    "records and targets do not depend on the model: no pseudo-labels, no adversarial examples, no "
    "hard-example mining"
)
"""Of hidden iterates."""


def listed(guarantee, lines):
    """Those of `lines` that are declared in a guarantee."""
    texts = [a.text for a in guarantee.assumptions if a.status is Status.DECLARED]
    return [line for line in lines if any(line in text for text in texts)]
