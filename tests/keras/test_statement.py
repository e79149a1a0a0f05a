"""The statement gives the accountant's figures, each with its label; it needs no TensorFlow."""

import pathlib
import re

import attrs
import dp_accounting
import pytest
from declared_lines import OF_EVERY_RUN
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
    assert figure(text, "released model (last iterate)") == pytest.approx(last, abs=1e-3)
    sensitivity = 2.0 if relation is NeighboringRelation.REPLACE_ONE else 1.0
    every = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(2.0 / sensitivity), 200)
    exact = hsa.LastIterateAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
    assert figure(text, "if all checkpoints are released") == pytest.approx(
        exact.compose(every).get_epsilon(DELTA), abs=1e-3
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
    assert "Declared by you:" in text
    assert all(line in flat for line in OF_EVERY_RUN)
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
        ((EVENT, DELTA, "REPLACE"), ValueError),
        ((EVENT, DELTA, "add_or_remove_one"), hsa.UnsupportedRunError),
        ((EVENT, DELTA, NeighboringRelation.ADD_OR_REMOVE_ONE), hsa.UnsupportedRunError),
    ],
)
def test_refused(arguments, kind):
    with pytest.raises(kind):
        compute_last_iterate_privacy_statement(*arguments)


# In the shape of TensorFlow Privacy's statement, for every kind of run


SHORT = attrs.evolve(EVENT, dataset_size=5000, num_steps=20)
DICE = hsa.DiceSgdDpEvent(
    noise_std=0.02,
    clip_norm=1.0,
    error_clip_norm=0.5,
    batch_size=100,
    dataset_size=2500,
    num_steps=50,
    gradient_bound=5.0,
    batch_order="cyclic",
)
BLOCKS = hsa.BlockCoordinateDpEvent(
    step_size=0.05,
    noise_variance=1.0,
    gradient_sensitivity=1.0,
    batch_size=100,
    dataset_size=2500,
    num_epochs=2,
)


def in_order(order):
    if order is hsa.BatchOrder.FULL:
        return attrs.evolve(SHORT, batch_order=order, batch_size=5000)
    return attrs.evolve(SHORT, batch_order=order)


# Paragraph by paragraph, of ours and of TensorFlow Privacy's.
SHAPE = [
    r"[^\n]* performed over \d+ examples with \d+ examples per iteration.*noise.*"
    r"\(?[\d.]+ epochs\)? without microbatching",
    r"This privacy guarantee protects the release of .*",
    r"Example-level DP with .* adjacency .*at delta = 1e-05,? computed .*:"
    r"( {4}Epsilon [^:]*: +([\d.]+|inf|not computed))+",
    r"No user-level privacy guarantee is possible without a bound on the number of examples per "
    r"user\.",
]


def paragraphs(text):
    return [part.replace("\n    ", "    ").replace("\n", " ") for part in text.split("\n\n")]


def has_shape(text):
    left = paragraphs(text)
    for pattern in SHAPE:
        while left and not re.match(pattern, left[0]):
            left.pop(0)  # ours lists assumptions in between
        if not left:
            return False
    return True


def test_the_shape_is_that_of_tf_privacy():
    privacy = pytest.importorskip("tensorflow_privacy")
    theirs = privacy.compute_dp_sgd_privacy_statement(5000, 500, 2, 2.0, DELTA, False)
    assert has_shape(theirs)
    assert not has_shape(theirs.replace("protects", "covers"))


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


@pytest.mark.parametrize(
    ("event", "relation"),
    [
        *(
            (in_order(order), relation)
            for order in hsa.BatchOrder
            for relation in (NeighboringRelation.REPLACE_SPECIAL, NeighboringRelation.REPLACE_ONE)
        ),
        (in_order(hsa.BatchOrder.FULL), NeighboringRelation.ADD_OR_REMOVE_ONE),
        (in_order(hsa.BatchOrder.POISSON), NeighboringRelation.ADD_OR_REMOVE_ONE),
        (attrs.evolve(SHORT, release_steps=(5, 10)), NeighboringRelation.REPLACE_ONE),
        (DICE, NeighboringRelation.REPLACE_SPECIAL),
        (DICE, NeighboringRelation.REPLACE_ONE),
        (BLOCKS, NeighboringRelation.REPLACE_ONE),
    ],
    ids=lambda value: getattr(value, "name", getattr(value, "batch_order", value)),
)
def test_every_kind_of_run(event, relation):
    text = compute_last_iterate_privacy_statement(event, DELTA, relation)
    assert has_shape(text), text
    assert relation.name in text
    exact = hsa.LastIterateAccountant(relation).compose(event).get_epsilon(DELTA)
    label = "all released models" if event is DICE else "released model (last iterate)"
    assert figure(text, label) == pytest.approx(exact, abs=1e-3)
    order = getattr(event, "batch_order", hsa.BatchOrder.CYCLIC)
    assert f"in {order.value} order" in " ".join(text.split())
    fixed = order not in (hsa.BatchOrder.POISSON, hsa.BatchOrder.FULL)
    assert ("ANOTHER algorithm, Poisson" in text) is (fixed and event not in (DICE, BLOCKS))


def test_dice_is_compared_with_dp_sgd_at_the_same_noise():
    text = compute_last_iterate_privacy_statement(DICE, DELTA)
    # noise multiplier 0.02 * 100 / 1, two passes
    every = dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(2.0), 2)
    exact = hsa.LastIterateAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE).compose(every)
    assert figure(text, "ANOTHER algorithm, DP-SGD (*)") == pytest.approx(
        exact.get_epsilon(DELTA), abs=1e-3
    )
    flat = " ".join(text.split())
    assert "noise multiplier 2, gradients clip norm 1, error clip norm 0.5, for 50" in flat
    assert "all model checkpoints in addition to the final model" in flat
    assert "It does not protect the error of the feedback" in flat
    normalised = attrs.evolve(DICE, automatic=True)
    assert "gradients normalised to 1, error normalised to 0.5" in " ".join(
        compute_last_iterate_privacy_statement(normalised, DELTA).split()
    )


@pytest.mark.parametrize("event", [in_order(hsa.BatchOrder.WITHOUT_REPLACEMENT), BLOCKS])
def test_relations_that_no_theorem_covers(event):
    with pytest.raises(hsa.UnsupportedRunError):
        compute_last_iterate_privacy_statement(event, DELTA, NeighboringRelation.ADD_OR_REMOVE_ONE)
