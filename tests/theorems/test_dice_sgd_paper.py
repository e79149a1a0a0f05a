"""DiceSGD as published: the paper's formulas typed again, and where they are wrong."""

import math

import numpy as np
import pytest
from dice_events import ADD, ONE, SPECIAL, published_noise_std, run

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds import DiceSgd

PAPER = {"clip_norm": 1.0, "error_clip_norm": 1.0, "batch_size": 1000, "dataset_size": 50_000,
         "num_steps": 150, "gradient_bound": math.inf}  # fmt: skip


def test_published_formulas_typed_again():
    event = run(**PAPER)
    noise = published_noise_std(event, 2.0, 1e-5)
    log = math.log(1e5)
    assert noise**2 == pytest.approx(32 * 150 * (1 + 2 * 1000**2) * log / (50_000 * 2) ** 2)
    for bound, smaller in ((11.0, 10.0), (0.5, 0.0)):
        noise = published_noise_std(run(**(PAPER | {"gradient_bound": bound})), 2.0, 1e-5)
        typed = 32 * 150 * (1 + 2 * smaller**2) * log / (50_000 * 2) ** 2
        assert noise**2 == pytest.approx(typed, rel=1e-9)
    automatic = run(**PAPER | {"automatic": True, "clip_norm": 0.3, "error_clip_norm": 0.3})
    noise = published_noise_std(automatic, 2.0, 1e-5)
    assert noise == pytest.approx(math.sqrt(96 * 150 * log) * 0.3 / (50_000 * 2), rel=1e-9)


def test_published_guarantee_inverts_the_noise_and_warns():
    for epsilon, delta in ((2.0, 1e-5), (0.5, 1e-8)):
        noise = published_noise_std(run(**PAPER), epsilon, delta)
        event = run(**PAPER | {"noise_std": noise})
        accountant = hsa.DiceSgdAccountant(analysis="published")
        with pytest.warns(UserWarning, match="false"):
            accountant.compose(event)
        assert accountant.get_epsilon(delta) == pytest.approx(epsilon, rel=1e-9)
        assert accountant.get_delta(epsilon) == pytest.approx(delta, rel=1e-9)
        assert accountant.guarantee.caveat
        sound = hsa.DiceSgdAccountant().compose(event).get_epsilon(delta)
        assert sound > 10 * epsilon


def test_the_papers_own_divergences_do_not_give_its_epsilon():
    """The last step of the proof: 16 alpha T G/(sigma N)^2 converts to more than epsilon."""
    noise = published_noise_std(run(**PAPER), 2.0, 1e-5)
    event = run(**PAPER | {"noise_std": noise})
    curve = DiceSgd("published").guarantee(event, ADD).curve
    orders = 1 + np.geomspace(1e-2, 1e3, 4000)
    typed = 16 * orders * 150 * (1 + 2 * 1000**2) / (noise * 50_000) ** 2
    np.testing.assert_allclose(curve.rdp(orders), typed, rtol=1e-12)
    assert np.min(typed + math.log(1e5) / (orders - 1)) > 1.4 * 2.0


def test_the_papers_bound_on_the_growth_is_false():
    """A.2 (a): the terms beside C1^2 sum to at most 2 T min(C^2, G'^2)."""
    excess = 899.0  # G' = G - C1, C2 = 1
    a, steps = excess - 1.0, range(150)
    growth = [(a * (t + 1) + 2) / (max(a * (t - 1), 0) + 1) for t in steps]
    assert sum(growth) > 1.5 * 2 * len(steps)


@pytest.mark.parametrize(
    ("changes", "relation", "match"),
    [
        ({"error_clip_norm": 0.5}, SPECIAL, "clip_norm"),
        ({"batch_size": 20_000}, SPECIAL, "0.2"),
        ({"batch_order": "cyclic"}, SPECIAL, "POISSON"),
        ({}, ONE, "REPLACE_SPECIAL"),
        ({"automatic": True, "clip_norm": 0.5}, SPECIAL, "clip_norm"),
    ],
)
def test_published_conditions(changes, relation, match):
    event = run(**PAPER | changes)
    assert DiceSgd("published").check(event, relation)
    with pytest.raises(hsa.UnsupportedRunError, match=match):
        DiceSgd("published").guarantee(event, relation)
