"""The statement gives the accountant's figures, each with its label; it needs no TensorFlow."""

import re

import attrs
import dp_accounting
import pytest
from dp_accounting import NeighboringRelation, rdp

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import compute_last_iterate_privacy_statement

DELTA = 1e-5
EVENT = hsa.LastIterateDpEvent(
    noise_multiplier=2.0,
    learning_rate=0.5,
    clip_norm=1.0,
    batch_size=500,
    dataset_size=50_000,
    num_steps=20_000,
    batch_order="cyclic",
    loss=hsa.LossGeometry.convex(smoothness=0.5),
    weight_decay=0.1,
)


def figure(text, label):
    return float(re.search(re.escape(label) + r"[^:]*:\s*([0-9.]+|inf)$", text, re.MULTILINE)[1])


@pytest.mark.parametrize(
    "relation", [NeighboringRelation.REPLACE_SPECIAL, NeighboringRelation.REPLACE_ONE]
)
def test_figures(relation):
    text = compute_last_iterate_privacy_statement(EVENT, DELTA, relation)
    last = hsa.LastIterateAccountant(relation).compose(EVENT).get_epsilon(DELTA)
    assert figure(text, "released model (last iterate)") == pytest.approx(last, abs=6e-4)
    sensitivity = 2.0 if relation is NeighboringRelation.REPLACE_ONE else 1.0
    every = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(2.0 / sensitivity), 200)
    exact = hsa.LastIterateAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
    assert figure(text, "if all checkpoints are released") == pytest.approx(
        exact.compose(every).get_epsilon(DELTA), abs=6e-4
    )
    poisson = rdp.RdpAccountant()
    poisson.compose(
        dp_accounting.PoissonSampledDpEvent(0.01, dp_accounting.GaussianDpEvent(2.0)), 20_000
    )
    other = figure(text, "ANOTHER algorithm, Poisson batches (*)")
    assert 0.8 * poisson.get_epsilon(DELTA) < other <= poisson.get_epsilon(DELTA)
    assert relation.name in text
    assert "Not this run" in text


def test_what_is_protected_and_assumed():
    text = compute_last_iterate_privacy_statement(EVENT, DELTA)
    flat = " ".join(text.split())
    assert "protects the release of the final model. It does not protect" in flat
    assert "LossGeometry.convex(smoothness=0.5)" in flat
    assert "Declared (your word):" in text
    assert max(map(len, text.splitlines())) <= 80
    released = attrs.evolve(EVENT, release_steps=(100, 200))
    text = " ".join(compute_last_iterate_privacy_statement(released, DELTA).split())
    assert "and of the models after iterations 100, 200" in text


def test_runs_without_some_figures():
    scheduled = attrs.evolve(EVENT, noise_multiplier=[2.0] * 10_000 + [3.0] * 10_000)
    assert "not computed" in compute_last_iterate_privacy_statement(scheduled, DELTA)
    sampled = attrs.evolve(EVENT, batch_order="poisson", num_steps=10)
    assert "ANOTHER" not in compute_last_iterate_privacy_statement(sampled, DELTA)
    silent = attrs.evolve(EVENT, noise_multiplier=0.0)
    assert "inf" in compute_last_iterate_privacy_statement(silent, DELTA)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ((dp_accounting.GaussianDpEvent(1.0), DELTA), TypeError),
        ((EVENT, 2.0), ValueError),
        ((EVENT, DELTA, "REPLACE_ONE"), TypeError),
        ((EVENT, DELTA, NeighboringRelation.ADD_OR_REMOVE_ONE), hsa.UnsupportedRunError),
    ],
)
def test_refused(arguments, kind):
    with pytest.raises(kind):
        compute_last_iterate_privacy_statement(*arguments)
