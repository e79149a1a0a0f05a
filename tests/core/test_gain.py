"""Whether a script gains, and what would lower its epsilon: the figures are the accountant's."""

import attrs
import dp_accounting
import pytest
from dp_accounting import NeighboringRelation
from runs import cyclic_run, dice_run, full_run, probe_run

import hidden_state_accountants as hsa
from hidden_state_accountants.advice import no_contraction_line, single_changes
from hidden_state_accountants.process.noisy_process import noisy_process

RELATION, DELTA = NeighboringRelation.REPLACE_SPECIAL, 1e-5


def run(order="poisson", **changes):
    """A softmax probe whose clip never acts."""
    fields = {"noise_multiplier": 6.0, "clip_norm": 1.4143, "num_steps": 2_000}
    return probe_run(batch_order=order, **(fields | changes))


def probe(order="cyclic", **changes):
    """The same on ten batches of 100, with little decay."""
    size = 1000 if order == "full" else 100
    fields = {"weight_decay": 0.005, "batch_size": size, "dataset_size": 1000, "num_steps": 200}
    return run(order, **(fields | changes))


def epsilon(event):
    return hsa.LastIterateAccountant(RELATION).compose(event).get_epsilon(DELTA)


def composed(event):
    return epsilon(attrs.evolve(event, loss=None))


def test_a_run_that_gains_says_by_how_much():
    gain = hsa.would_gain(run())
    assert gain.verdict == "yes"
    assert gain.epsilon == epsilon(run())
    assert gain.every_iterate == pytest.approx(composed(run()), rel=1e-3)
    stock = dp_accounting.pld.PLDAccountant().compose(run().as_composition()).get_epsilon(DELTA)
    assert gain.every_iterate == pytest.approx(stock, rel=1e-3)
    assert epsilon(run(noise_multiplier=gain.noise_multiplier)) <= gain.every_iterate
    assert epsilon(run(noise_multiplier=0.99 * gain.noise_multiplier)) > gain.every_iterate
    for text in ("would it gain: yes", "instead of 6\n", "one change: weight decay"):
        assert text in str(gain)


def test_the_stock_figure_is_the_smaller_of_two():
    long = run("cyclic", num_steps=20_000)
    gain = hsa.would_gain(long)
    assert gain.verdict == "yes"
    assert gain.every_iterate == pytest.approx(composed(long), rel=1e-3)
    poisson = composed(attrs.evolve(long, batch_order="poisson"))
    assert gain.with_poisson_batches == pytest.approx(poisson, rel=1e-3)
    met = epsilon(attrs.evolve(long, noise_multiplier=gain.noise_multiplier))
    assert 0.99 * gain.with_poisson_batches < met <= gain.with_poisson_batches
    guarantee = hsa.LastIterateAccountant().compose(long).guarantee
    assert gain.change == guarantee.changes(DELTA, gain.epsilon)[0]


def test_a_short_run_gains_with_its_own_batches_only():
    short = {"batch_size": 20, "dataset_size": 60, "num_steps": 15, "weight_decay": 0.005}
    gain = hsa.would_gain(run("shuffled_once", **short))
    assert gain.verdict == "only with these batches"
    assert gain.with_poisson_batches < gain.epsilon < gain.every_iterate
    met = epsilon(attrs.evolve(gain.event, noise_multiplier=gain.noise_multiplier))
    assert 0.99 * gain.every_iterate < met <= gain.every_iterate


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"loss": None}, "a network with hidden layers has none"),
        ({"weight_decay": 0.0}, "the update does not shrink distances"),
        ({"num_steps": 5}, "too few steps: one of them keeps up to c = 0.95 of a distance"),
        ({"clip_norm": 1.0, "weight_decay": 0.0}, "a step stretches distances by up to c = 1.03"),
    ],
)
def test_no_says_why(changes, reason):
    gain = hsa.would_gain(run(**changes))
    assert gain.verdict == "no"
    assert gain.noise_multiplier is None
    assert reason in str(gain)


def test_a_rate_that_stretches_is_the_change_that_matters():
    long_features = hsa.LossGeometry.softmax_cross_entropy(feature_norm=6.0)
    event = run(noise_multiplier=2.0, clip_norm=8.49, loss=long_features, num_steps=3_000)
    description, changed = hsa.would_gain(event).change
    assert description.startswith("learning rate 0.0546: ")
    assert "up to twice the mean size" in description
    assert changed < 0.5 * epsilon(event)


def test_other_runs_are_refused():
    with pytest.raises(TypeError, match="hiding the iterates is about noisy SGD"):
        hsa.would_gain(dice_run())


# What would lower epsilon


def changes(event):
    return single_changes(event, RELATION, DELTA, epsilon(event))


def named(event, words):
    """The one change whose description has some words, with its epsilon."""
    (found,) = [change for change in changes(event) if words in change[0]]
    return found


def test_what_costs_no_accuracy_comes_first_with_the_epsilon_of_the_changed_run():
    event = cyclic_run(release_steps=(8,))
    found = changes(event)
    assert dict(found)["release the last iterate only, not 1 more"] == epsilon(
        attrs.evolve(event, release_steps=())
    )
    costs = ("weight decay", "learning rate")
    free = [value for text, value in found if not text.startswith(costs)]
    assert free == sorted(free) == [value for _, value in found[: len(free)]]
    assert max(value for _, value in found) < 0.99 * epsilon(event)
    changes(full_run(learning_rate=1.0, weight_decay=0.7))  # twice the decay is no run


@pytest.mark.parametrize(
    ("order", "others"),
    [
        ("cyclic", {"Poisson batches": "poisson", "shuffled once": "shuffled_once"}),
        ("reshuffled", {"Poisson batches": "poisson"}),
        ("full", {}),
    ],
)
def test_other_batches_have_the_accountants_own_figure(order, others):
    """A Poisson run of 2.010 stood beside the words "poisson at most 3.168"."""
    event = probe(order)
    found = {text: value for text, value in changes(event) if "batches" in text or "shuf" in text}
    assert len(found) == len(others)
    for text, value in found.items():
        (other,) = [name for words, name in others.items() if text.startswith(words)]
        assert value == epsilon(probe(other)) < epsilon(event)


@pytest.mark.parametrize(("order", "schedule"), [("full", 0), ("cyclic", 0), ("cyclic", 1)])
def test_a_step_that_stretches_distances_is_named_first(order, schedule):
    """A rate of 2/(M + w) does not, and with one of 2/(M + 2 w) all of the decay contracts."""
    loss = hsa.LossGeometry.generalized_linear(8.0, 1.4142)
    rate = [0.3] * 100 + [0.5] * 100 if schedule else 0.5
    event = probe(order, loss=loss, learning_rate=rate, weight_decay=0.1)
    (text, value), *_ = changes(event)
    assert "then stretches distances" in text
    assert text.endswith("up to c = 3.05")
    number = float(text.split(":")[0].split()[-1])
    assert 0.985 < number * (0.5 if schedule else 1) * (8 + 2 * 0.1) / 2 <= 1.0001
    if not schedule:
        shorter = attrs.evolve(event, learning_rate=number)
        assert noisy_process(shorter, RELATION).contraction.max() <= 1
        assert value == epsilon(shorter) < epsilon(event)


def test_a_clip_that_never_acts():
    event = probe(clip_norm=1.0, weight_decay=0.1)
    text, value = named(event, "same noise multiplier")
    assert text.startswith("clip norm 1.41421, which never acts, instead of 1, at the same")
    assert value == epsilon(attrs.evolve(event, clip_norm=event.loss.lipschitz))
    assert not [t for t, _ in changes(probe(loss=hsa.LossGeometry.convex(0.5))) if "clip" in t]


def test_a_run_that_does_not_contract_says_so():
    assert "no loss is declared" in no_contraction_line(probe(loss=None), RELATION)
    assert no_contraction_line(probe(), RELATION) == ""
