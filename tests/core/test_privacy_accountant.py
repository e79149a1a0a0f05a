"""dp-accounting's own conformance class, on each accountant and relation."""

import dp_accounting
import pytest
from dp_accounting import NeighboringRelation, privacy_accountant_test
from runs import full_run

import hidden_state_accountants as hsa

ACCOUNTANTS = (
    hsa.LastIterateAccountant,
    hsa.ShiftedInterpolationAccountant,
    hsa.ChienLiAccountant,
    hsa.KongRiberoAccountant,
)


def conformance(accountant, *analyses):
    """dp-accounting's own tests of one accountant."""

    def make(self):
        kinds = [{"analysis": analysis} for analysis in analyses] or [{}]
        return [accountant(relation, **kind) for relation in NeighboringRelation for kind in kinds]

    base = privacy_accountant_test.PrivacyAccountantTest
    return type(accountant.__name__, (base,), {"_make_test_accountants": make})


BOTH = ("sound", "published")
LastIterateConformanceTest = conformance(hsa.LastIterateAccountant)
ShiftedInterpolationConformanceTest = conformance(hsa.ShiftedInterpolationAccountant)
ChienLiConformanceTest = conformance(hsa.ChienLiAccountant)
KongRiberoConformanceTest = conformance(hsa.KongRiberoAccountant)
LangevinConformanceTest = conformance(hsa.LangevinAccountant, *BOTH)
BlockCoordinateConformanceTest = conformance(hsa.BlockCoordinateAccountant, *BOTH)
DiceSgdConformanceTest = conformance(hsa.DiceSgdAccountant, *BOTH)


@pytest.mark.parametrize(
    "accountant",
    [
        *ACCOUNTANTS,
        hsa.LangevinAccountant,
        hsa.BlockCoordinateAccountant,
        hsa.DiceSgdAccountant,
    ],
)
def test_relation_is_the_first_argument_and_has_a_default(accountant):
    assert accountant().neighboring_relation is NeighboringRelation.REPLACE_SPECIAL
    relation = NeighboringRelation.REPLACE_ONE
    assert accountant(relation).neighboring_relation is relation
    assert accountant("replace_one").neighboring_relation is relation
    with pytest.raises(ValueError, match="neighboring_relation to be one of ADD_OR_REMOVE_ONE"):
        accountant("replace one")


@pytest.mark.parametrize("accountant", ACCOUNTANTS)
def test_calibrate_dp_mechanism(accountant):
    def make_event(noise_multiplier):
        return full_run(noise_multiplier=noise_multiplier, num_steps=50)

    noise = dp_accounting.calibrate_dp_mechanism(accountant, make_event, 2.0, 1e-5, tol=1e-6)
    at_noise = accountant().compose(make_event(noise)).get_epsilon(1e-5)
    below = accountant().compose(make_event(noise - 1e-4)).get_epsilon(1e-5)
    assert at_noise <= 2.0 < below
