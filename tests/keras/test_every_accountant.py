"""What any of the optimizers did, told to every accountant and to the comparison."""

import math
import warnings

import pytest
from dp_accounting import NeighboringRelation

pytest.importorskip("tensorflow_privacy")

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import (
    BlockCoordinateKerasOptimizer,
    CyclicDPKerasSGDOptimizer,
    DiceKerasAdamOptimizer,
    DiceKerasSGDOptimizer,
)

DELTA, RELATION = 1e-5, NeighboringRelation.REPLACE_SPECIAL
ACCOUNTANTS = [getattr(hsa, name) for name in hsa.__all__ if name.endswith("Accountant")]
# By optimizer: how it is made, and the accountants that are about its runs.
OPTIMIZERS = {
    CyclicDPKerasSGDOptimizer: (
        {"weight_decay": 0.1, "loss_geometry": hsa.LossGeometry.convex(0.5, lipschitz=1.4143)},
        {
            hsa.LastIterateAccountant,
            hsa.ShiftedInterpolationAccountant,
            hsa.ChienLiAccountant,
            hsa.KongRiberoAccountant,
        },
    ),
    DiceKerasSGDOptimizer: (
        {"error_l2_norm_clip": 0.125},
        {hsa.LastIterateAccountant, hsa.DiceSgdAccountant},
    ),
    DiceKerasAdamOptimizer: (
        {"automatic": True},
        {hsa.LastIterateAccountant, hsa.DiceSgdAccountant},
    ),
    BlockCoordinateKerasOptimizer: (
        {"l2": 0.5},
        {hsa.LastIterateAccountant, hsa.BlockCoordinateAccountant},
    ),
}


@pytest.fixture(params=OPTIMIZERS, ids=lambda kind: kind.__name__)
def trained(request, make_run):
    """(event, the accountants that are about it) of two epochs with an optimizer."""
    kind = request.param
    options, about = OPTIMIZERS[kind]
    run = make_run()
    optimizer = kind(1.5, 40.0, learning_rate=0.25, **options)
    run.model.compile(optimizer, run.model.loss)
    run.fit(epochs=2)
    return run.callback.privacy_event, about


def test_every_accountant_accounts_the_event_or_says_why_not(trained):
    event, about = trained
    epsilons = {}
    for kind in ACCOUNTANTS:
        accountant = kind(RELATION)
        if kind in about:
            epsilons[kind] = accountant.compose(event).get_epsilon(DELTA)
            continue
        with pytest.raises(hsa.UnsupportedRunError, match=type(event).__name__):
            accountant.compose(event)
        assert accountant.get_epsilon(DELTA) == 0  # nothing was composed
    assert 0 < epsilons[hsa.LastIterateAccountant] < math.inf
    own = epsilons[hsa.LastIterateAccountant]
    assert own == min(epsilons.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of published formulas
        table = hsa.compare(event, DELTA, RELATION)
    proven = [row.epsilon for row in table.rows if row.status == "proven"]
    assert min(proven) == own
