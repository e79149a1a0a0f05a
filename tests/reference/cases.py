"""How many cases of a family "make test" runs; "make test-all" runs every one."""

import pytest

USUAL = 6


def seeds(count, usual=USUAL):
    """The parameters 0 to `count - 1`, of which those from `usual` on are marked exhaustive.

    Args:
        count: How many there are.
        usual: How many of them "make test" runs. More than six need a reason beside the test: the
            mutant that six of them do not notice.
    """
    return first(usual, range(count))


def first(usual, cases):
    """The cases, tuples for several names; those from `usual` on are marked exhaustive."""
    cases = list(cases)
    further = [
        pytest.param(*(case if isinstance(case, tuple) else [case]), marks=pytest.mark.exhaustive)
        for case in cases[usual:]
    ]
    return [*cases[:usual], *further]
