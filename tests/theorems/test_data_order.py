"""Secret orders: means over the positions, against enumeration and exact mixtures."""

import itertools
import math

import attrs
import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from runs import cyclic_run, probe_run
from shift_programs import least_squares_mu_squared

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds import Reshuffled, ShuffledOnce
from hidden_state_accountants.bounds.data_order import mean_over_places
from hidden_state_accountants.bounds.shifted_interpolation import mu_squared_by_position
from hidden_state_accountants.curves.base import GaussianMixtureCurve, best_curve, known_of
from hidden_state_accountants.curves.gaussian import delta_from_mu
from hidden_state_accountants.curves.hidden_place import HiddenPlaceCurve
from hidden_state_accountants.process.noisy_process import noisy_process

SPECIAL, ONE = NeighboringRelation.REPLACE_SPECIAL, NeighboringRelation.REPLACE_ONE
EPSILONS = (0.0, 0.2, 1.0, 2.5)


def cyclic_mu(event, position):
    process = noisy_process(attrs.evolve(event, batch_order="cyclic"), SPECIAL)
    return math.sqrt(mu_squared_by_position(process)[position])


class TestShuffledOnce:
    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"num_steps": 22},  # partial last epoch
            {"num_steps": 3},  # less than an epoch: some positions are never reached
            {"release_steps": (5, 6, 13)},
            {"learning_rate": np.geomspace(0.5, 0.05, 24)},
            {"domain_diameter": 0.3},
            {"learning_rate": 3.5, "domain_diameter": 1.0},
        ],
        ids=["plain", "partial", "short", "releases", "schedule", "domain", "expanding"],
    )
    def test_mean_over_the_cyclic_positions(self, changes):
        event = cyclic_run(batch_order="shuffled_once", **changes)
        mus = [
            cyclic_mu(event, p) if p < event.num_steps else 0.0
            for p in range(event.batches_per_epoch)
        ]
        curve = ShuffledOnce().guarantee(event, SPECIAL).curve.revealed
        for epsilon in EPSILONS:
            expected = np.mean([delta_from_mu(mu, epsilon) for mu in mus])
            assert curve.delta(epsilon) == pytest.approx(expected, rel=1e-11)

    def test_reference_value(self):
        event = probe_run(batch_order="shuffled_once")
        epsilon = hsa.LastIterateAccountant().compose(event).get_epsilon(1e-5)
        assert epsilon == pytest.approx(0.4951, abs=2e-4)

    def test_releases_share_the_order(self):
        """Averaging per release and composing the averages is unsound: it gives 5.757 here."""
        event = hsa.LastIterateDpEvent(
            noise_multiplier=1 / 1.2, learning_rate=[1.0, 0.0] * 6, clip_norm=1.0, batch_size=1,
            dataset_size=2, num_steps=12, batch_order="shuffled_once",
            loss=hsa.LossGeometry.linear(1.0), release_steps=range(1, 12),
        )  # fmt: skip
        exact = math.log((1 + math.exp(6 * 1.44)) / 2)  # six participations, or none that counts
        averaged = 6 * math.log((1 + math.exp(1.44)) / 2)
        bound = ShuffledOnce().guarantee(event, SPECIAL).rdp(np.array([2.0]))[0]
        assert averaged < 0.73 * exact
        assert bound == pytest.approx(exact, rel=1e-12)


def worst_given_positions(event, positions):
    """mu of the record with the given position in each epoch, by a general solver."""
    process = hsa.process.noisy_process.noisy_process(event, SPECIAL)
    period = event.batches_per_epoch
    sensitivity = np.zeros(event.num_steps)
    for epoch, position in enumerate(positions):
        step = epoch * period + position
        if step < event.num_steps:
            sensitivity[step] = process.sensitivity[step]
    return math.sqrt(least_squares_mu_squared(process.contraction, sensitivity, process.noise_std))


def of_revealed_places(event):
    """What is known of reshuffled batches without Theorem F, which hides the last place."""
    known = known_of(Reshuffled().guarantee(event, SPECIAL).curve)
    return best_curve(curve for curve, _ in known if not isinstance(curve, HiddenPlaceCurve))


class TestReshuffled:
    @pytest.mark.parametrize("steps", [12, 9, 3])
    @pytest.mark.parametrize("decay", [0.0, 1.0])
    @pytest.mark.parametrize("rates", [0.5, "falling", "jumping"])
    def test_covers_the_mean_over_all_sequences_of_positions(self, steps, decay, rates):
        """Given all positions Theorem A applies: the mean over them is a bound of its own."""
        schedules = {
            "falling": np.geomspace(0.5, 0.05, steps),
            "jumping": np.resize([0.5, 0.3, 2.2, 0.05, 0.4], steps),  # 2.2 expands
        }
        event = cyclic_run(
            batch_order="reshuffled", num_steps=steps,
            weight_decay=decay * (rates != "jumping"),
            learning_rate=schedules.get(rates, rates),
            loss=hsa.LossGeometry.generalized_linear(1.0),
        )  # fmt: skip
        period, epochs = event.batches_per_epoch, -(-steps // event.batches_per_epoch)
        mus = [
            worst_given_positions(event, positions)
            for positions in itertools.product(range(period), repeat=epochs)
        ]
        finest = GaussianMixtureCurve(np.full(len(mus), 1 / len(mus)), mus)
        curve = of_revealed_places(event)
        for epsilon in EPSILONS:
            assert finest.delta(epsilon) * (1 - 1e-9) <= curve.delta(epsilon)
            assert curve.delta(epsilon) <= 2 * finest.delta(epsilon) + 1e-9
        if rates != 0.5:
            return
        last = worst_given_positions(event, [period - 1] * (epochs - 1) + [(steps - 1) % period])
        assert last >= max(mus) * (1 - 1e-12)  # a later participation never costs less
        for epsilon in EPSILONS:
            assert curve.delta(epsilon) <= delta_from_mu(last, epsilon) * (1 + 1e-12)

    def test_last_position_is_not_the_worst_of_an_expanding_map(self):
        event = cyclic_run(
            batch_order="reshuffled", num_steps=12, learning_rate=2.1, weight_decay=0.0,
            loss=hsa.LossGeometry.generalized_linear(1.0),
        )  # fmt: skip
        assert worst_given_positions(event, [3, 0, 3]) > worst_given_positions(event, [3, 3, 3])
        alone = attrs.evolve(event, num_steps=4)
        epoch = ShuffledOnce().guarantee(attrs.evolve(alone, batch_order="shuffled_once"), SPECIAL)
        curve = of_revealed_places(event)
        assert len(curve.known) == 2  # with and without carries: nothing else is proven
        orders = np.array([2.0, 7.0])
        assert (curve.rdp(orders) < 0.9 * 3 * epoch.rdp(orders)).all()

    def test_every_epoch_released_composes_epoch_by_epoch(self):
        rates = np.geomspace(0.5, 0.05, 24)
        event = cyclic_run(
            batch_order="reshuffled", learning_rate=rates, release_steps=range(4, 24, 4)
        )
        parts = [
            ShuffledOnce().guarantee(
                cyclic_run(
                    batch_order="shuffled_once", num_steps=4, learning_rate=rates[i : i + 4]
                ),
                SPECIAL,
            )
            for i in range(0, 24, 4)
        ]
        orders = np.array([1.5, 4.0])
        expected = sum(part.rdp(orders) for part in parts)
        found = Reshuffled().guarantee(event, SPECIAL).rdp(orders)
        assert (expected * (1 - 1e-9) <= found).all()
        np.testing.assert_allclose(found, expected, rtol=3e-3)  # rounded up

    @pytest.mark.parametrize("rates", [[0.5] * 8, np.geomspace(0.05, 0.5, 8)])
    def test_releases_inside_an_epoch_compose_inside_the_position(self, rates):
        releases = (2, 4, 5) if rates[0] == rates[-1] else (2, 4, 6)  # of one shape, or not
        event = cyclic_run(
            batch_order="reshuffled", num_steps=8, release_steps=releases, learning_rate=rates
        )
        first, second = (
            ShuffledOnce().guarantee(
                cyclic_run(
                    batch_order="shuffled_once", num_steps=4,
                    learning_rate=rates[start : start + 4],
                    release_steps=[r - start for r in releases if start < r < start + 4],
                ),
                SPECIAL,
            )
            for start in (0, 4)
        )  # fmt: skip
        orders = np.array([1.5, 4.0])
        np.testing.assert_allclose(
            Reshuffled().guarantee(event, SPECIAL).rdp(orders),
            first.rdp(orders) + second.rdp(orders),
        )

    @pytest.mark.parametrize("relation", [SPECIAL, ONE])
    @pytest.mark.parametrize("diameter", [0.05, 0.3, 2.0])
    def test_domain(self, diameter, relation):
        """A domain never hurts, and a tiny one leaves one step."""
        event = cyclic_run(batch_order="reshuffled", domain_diameter=diameter)
        free = attrs.evolve(event, domain_diameter=math.inf)
        orders = np.array([1.2, 2.0, 9.0])
        small = Reshuffled().guarantee(event, relation).rdp(orders)
        assert (small <= Reshuffled().guarantee(free, relation).rdp(orders) * (1 + 1e-9)).all()


@pytest.mark.parametrize("bound", [ShuffledOnce(), Reshuffled()])
def test_other_runs_are_refused(bound):
    for changes, word in [
        ({"batch_order": "cyclic"}, "batch order"),
        ({"batch_order": bound.name, "loss": None}, "loss geometry"),
        ({"batch_order": bound.name, "dataset_size": 21}, "equal batches"),
    ]:
        unmet = bound.check(cyclic_run(**changes), SPECIAL)
        assert [condition.condition for condition in unmet] == [word]
    with pytest.raises(hsa.UnsupportedRunError, match="REPLACE_SPECIAL"):
        hsa.LastIterateAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE).compose(
            cyclic_run(batch_order=bound.name)
        )


def test_the_secret_is_an_assumption():
    guarantee = ShuffledOnce().guarantee(cyclic_run(batch_order="shuffled_once"), SPECIAL)
    assert any("ever published" in a.text for a in guarantee.assumptions)
    assert not any(a.text.startswith("order of the batches") for a in guarantee.assumptions)


@pytest.mark.parametrize("mus", [0.97 ** np.arange(5000), np.linspace(0.1, 3, 5000)])
def test_many_places_are_rounded_up_a_little(mus):
    exact = GaussianMixtureCurve(np.full(5000, 1 / 5000), mus)
    rounded = mean_over_places(mus)
    assert len(rounded.mus) < 2500
    for epsilon in (0.0, 0.1, 1.0, 5.0):
        assert 1 <= rounded.delta(epsilon) / exact.delta(epsilon) < 1.01 + epsilon / 100
