"""Events and small helpers of the tests of Chien & Li 2024."""

from dp_accounting import NeighboringRelation

from hidden_state_accountants.bounds import ChienLi

REPLACE_ONE = NeighboringRelation.REPLACE_ONE

SOUND, PUBLISHED = ChienLi(), ChienLi("published")
ALPHA = 3.0


def per_alpha(event, bound=PUBLISHED, relation=REPLACE_ONE):
    """epsilon/alpha of an event."""
    return float(bound.guarantee(event, relation).rdp([ALPHA])[0]) / ALPHA
