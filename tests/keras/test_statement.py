"""The statement gives the accountant's figures, each with its label; it needs no TensorFlow."""

import pathlib
import re

import attrs
import dp_accounting
import pytest
from declared_lines import OF_EVERY_RUN
from dp_accounting import NeighboringRelation

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
    return float(re.search(rf"^{re.escape(label)}[:=] ?([0-9.]+|inf)", text, re.MULTILINE)[1])


@pytest.mark.parametrize(
    "relation", [NeighboringRelation.REPLACE_SPECIAL, NeighboringRelation.REPLACE_ONE]
)
def test_figures(relation):
    text = compute_last_iterate_privacy_statement(EVENT, DELTA, relation)
    last = hsa.LastIterateAccountant(relation).compose(EVENT).get_epsilon(DELTA)
    assert figure(text, "epsilon ") == pytest.approx(last, abs=1e-4)
    sensitivity = 2.0 if relation is NeighboringRelation.REPLACE_ONE else 1.0
    every = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(2.0 / sensitivity), 200)
    exact = hsa.LastIterateAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
    assert figure(text, "epsilon if every iterate were released") == pytest.approx(
        exact.compose(every).get_epsilon(DELTA), abs=1e-4
    )
    assert relation.name in text


def test_what_is_released_and_assumed():
    text = compute_last_iterate_privacy_statement(EVENT, DELTA)
    assert "released: the last iterate\n" in text
    assert "LossGeometry.convex(smoothness=0.5)" in text
    assert "declared by you:" in text
    assert all(line in text for line in OF_EVERY_RUN)
    released = attrs.evolve(EVENT, release_steps=(100, 200))
    text = compute_last_iterate_privacy_statement(released, DELTA)
    assert "the last iterate, and after steps 100, 200" in text


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ((dp_accounting.GaussianDpEvent(1.0), DELTA), TypeError),
        ((EVENT, 2.0), ValueError),
        ((EVENT, DELTA, "REPLACE"), ValueError),
        ((EVENT, DELTA, "add_or_remove_one"), hsa.UnsupportedRunError),
        ((EVENT, DELTA, NeighboringRelation.ADD_OR_REMOVE_ONE), hsa.UnsupportedRunError),
    ],
)
def test_refused(arguments, kind):
    with pytest.raises(kind):
        compute_last_iterate_privacy_statement(*arguments)


def test_the_figures_beside_those_of_tf_privacy_on_the_page():
    """docs/keras.md, "Why is my epsilon different?": the table."""
    privacy = pytest.importorskip("tensorflow_privacy")
    page = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "keras.md").read_text()
    lines = ("default (`used_microbatching=True`)", "one example each", '="cyclic"`, any optimizer')
    default, single, ours = (
        float(re.search(rf"^\|.*{re.escape(line)} \| ([\d.]+) \|$", page, re.MULTILINE)[1])
        for line in lines
    )

    def theirs(**options):
        text = privacy.compute_dp_sgd_privacy_statement(1500, 150, 20, 6.0, 1e-5, **options)
        return float(re.search(r"occurring once per epoch: +([\d.]+)", text)[1])

    run = hsa.LastIterateDpEvent(
        noise_multiplier=6.0, learning_rate=0.5, clip_norm=1.4143, weight_decay=0.005,
        batch_size=150, dataset_size=1500, num_steps=200, batch_order="cyclic",
    )  # fmt: skip
    every = hsa.LastIterateAccountant().compose(run).get_epsilon(1e-5)
    assert theirs() == pytest.approx(default, abs=0.005)
    assert theirs(used_microbatching=False) == pytest.approx(single, abs=0.005)
    assert every == pytest.approx(ours, abs=0.005)
