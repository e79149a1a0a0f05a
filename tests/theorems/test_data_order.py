"""Secret orders: means over the positions, against enumeration and exact mixtures.

Exact laws of attacks are in test_attacks.py beside this file.
"""

import itertools
import math

import attrs
import numpy as np
import pytest
from cases import seeds
from dp_accounting import NeighboringRelation
from runs import cyclic_run, probe_run
from scipy import optimize
from shift_programs import least_squares_mu_squared

import hidden_state_accountants as hsa
from hidden_state_accountants.bounds import Reshuffled, ShuffledOnce
from hidden_state_accountants.bounds.data_order import late_participations, mean_over_places
from hidden_state_accountants.bounds.shifted_interpolation import (
    mu_squared_by_position,
    segment_mu_squared,
)
from hidden_state_accountants.bounds.solvers.carries import (
    EpochCosts,
    best_carries,
    carried_curve,
)
from hidden_state_accountants.bounds.solvers.shifts import least_mu_squared
from hidden_state_accountants.curves.base import GaussianMixtureCurve, best_curve, known_of
from hidden_state_accountants.curves.gaussian import delta_from_mu
from hidden_state_accountants.curves.hidden_place import HiddenPlaceCurve
from hidden_state_accountants.process.noisy_process import noisy_process

SPECIAL, ONE = NeighboringRelation.REPLACE_SPECIAL, NeighboringRelation.REPLACE_ONE
EPSILONS = (0.0, 0.2, 1.0, 2.5)


class TestShuffledOnce:
    @pytest.mark.parametrize(
        "changes",
        [
            {"num_steps": 22},  # partial last epoch
            {"num_steps": 3},  # less than an epoch: some positions are never reached
            {"release_steps": (5, 6, 13)},
            {"learning_rate": np.geomspace(0.5, 0.05, 24)},
            {"domain_diameter": 0.3},
            {"learning_rate": 3.5, "domain_diameter": 1.0},
        ],
        ids=["partial", "short", "releases", "schedule", "domain", "expanding"],
    )
    def test_mean_over_the_cyclic_positions(self, changes):
        event = cyclic_run(batch_order="shuffled_once", **changes)
        process = noisy_process(attrs.evolve(event, batch_order="cyclic"), SPECIAL)
        mus = np.zeros(event.batches_per_epoch)
        mus[: event.num_steps] = np.sqrt(mu_squared_by_position(process))
        curve = ShuffledOnce().guarantee(event, SPECIAL).curve.revealed
        for epsilon in EPSILONS:
            expected = np.mean([delta_from_mu(mu, epsilon) for mu in mus])
            assert curve.delta(epsilon) == pytest.approx(expected, rel=1e-11)

    def test_reference_value(self):
        event = probe_run(batch_order="shuffled_once")
        epsilon = hsa.LastIterateAccountant().compose(event).get_epsilon(1e-5)
        assert epsilon == pytest.approx(0.4951, abs=2e-4)


def pushes(process, positions):
    """What the record moves in each step, given its position in each epoch."""
    at = [process.period * epoch + position for epoch, position in enumerate(positions)]
    return np.where(np.isin(np.arange(process.num_steps), at), process.sensitivity, 0.0)


def worst_mu(process, positions):
    """Theorem A by a general solver."""
    moves = pushes(process, positions)
    return math.sqrt(least_squares_mu_squared(process.contraction, moves, process.noise_std))


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
        process = noisy_process(event, SPECIAL)
        mus = [worst_mu(process, p) for p in itertools.product(range(period), repeat=epochs)]
        finest = GaussianMixtureCurve(np.full(len(mus), 1 / len(mus)), mus)
        curve = of_revealed_places(event)
        for epsilon in EPSILONS:
            assert finest.delta(epsilon) * (1 - 1e-9) <= curve.delta(epsilon)
            assert curve.delta(epsilon) <= 2 * finest.delta(epsilon) + 1e-9
        if rates != 0.5:
            return
        last = worst_mu(process, [period - 1] * (epochs - 1) + [(steps - 1) % period])
        assert last >= max(mus) * (1 - 1e-12)  # a later participation never costs less
        for epsilon in EPSILONS:
            assert curve.delta(epsilon) <= delta_from_mu(last, epsilon) * (1 + 1e-12)

    @pytest.mark.parametrize(("period", "steps"), [(1, 40), (2, 13)])
    def test_windows_in_a_domain_cover_the_costliest_sequence(self, period, steps):
        """They start a diameter apart, whatever was before them."""
        event = cyclic_run(
            batch_order="reshuffled", dataset_size=5 * period, num_steps=steps, weight_decay=0.0,
            domain_diameter=0.15, loss=hsa.LossGeometry.generalized_linear(1.0),
        )  # fmt: skip
        process = noisy_process(event, SPECIAL)

        def cost(moves, start):
            return least_mu_squared(
                process.contraction[start:],
                moves[start:],
                process.noise_std[start:],
                initial_shift=0.15 * (start > 0),
            )

        costs = [
            min(cost(pushes(process, positions), start) for start in range(steps))
            for positions in itertools.product(range(period), repeat=-(-steps // period))
        ]
        found = late_participations(process).largest_mu
        assert found == pytest.approx(math.sqrt(max(costs)), rel=1e-9)
        unbounded = attrs.evolve(process, domain_diameter=math.inf)
        assert found < 0.96 * late_participations(unbounded).largest_mu

    def test_last_position_is_not_the_worst_of_an_expanding_map(self):
        event = cyclic_run(
            batch_order="reshuffled", num_steps=12, learning_rate=2.1, weight_decay=0.0,
            loss=hsa.LossGeometry.generalized_linear(1.0),
        )  # fmt: skip
        process = noisy_process(event, SPECIAL)
        assert worst_mu(process, [3, 0, 3]) > worst_mu(process, [3, 3, 3])
        alone = attrs.evolve(event, num_steps=4)
        epoch = ShuffledOnce().guarantee(attrs.evolve(alone, batch_order="shuffled_once"), SPECIAL)
        curve = of_revealed_places(event)
        assert len(curve.known) == 2  # with and without carries: nothing else is proven
        orders = np.array([2.0, 7.0])
        assert (curve.rdp(orders) < 0.9 * 3 * epoch.rdp(orders)).all()

    @pytest.mark.parametrize(
        ("rates", "releases"),
        [
            (np.geomspace(0.5, 0.05, 24), range(4, 24, 4)),  # epoch by epoch
            (np.full(8, 0.5), (2, 4, 5)),  # and inside the position
            (np.geomspace(0.05, 0.5, 8), (2, 4, 6)),
        ],
    )
    def test_released_epochs_compose(self, rates, releases):
        event = cyclic_run(
            batch_order="reshuffled",
            num_steps=len(rates),
            learning_rate=rates,
            release_steps=releases,
        )
        parts = [
            cyclic_run(
                batch_order="shuffled_once",
                num_steps=4,
                learning_rate=rates[start : start + 4],
                release_steps=[r - start for r in releases if start < r < start + 4],
            )
            for start in range(0, len(rates), 4)
        ]
        orders = np.array([1.5, 4.0])
        expected = sum(ShuffledOnce().guarantee(part, SPECIAL).rdp(orders) for part in parts)
        found = Reshuffled().guarantee(event, SPECIAL).rdp(orders)
        assert (expected * (1 - 1e-9) <= found).all()
        np.testing.assert_allclose(found, expected, rtol=3e-3)  # rounded up


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


DELTAS = (1e-2, 1e-5, 1e-9)


def process_of(rng, steps, period=3, releases=()):
    """A run whose contractions (some above 1), pushes and noises are unrelated."""
    event = cyclic_run(
        batch_order="reshuffled", num_steps=steps, dataset_size=5 * period, release_steps=releases
    )
    return attrs.evolve(
        noisy_process(event, SPECIAL),
        contraction=rng.uniform(0.4, 1.2, steps),
        sensitivity=rng.uniform(0.1, 2.0, steps),
        noise_std=rng.uniform(0.3, 2.0, steps),
        is_constant=False,
    )


def cost_of_an_epoch(process, epoch, position, start, end):
    """The least cost from a distance `start` to one of at most `end`, by a general solver."""
    steps = slice(epoch * process.period, min((epoch + 1) * process.period, process.num_steps))
    c, sigma = process.contraction[steps], process.noise_std[steps]
    moves = np.where(np.arange(len(c)) == position, process.sensitivity[steps], 0.0)

    def shifts(z):
        return c * np.append(start, z[:-1]) + moves - z

    result = optimize.minimize(
        lambda z: float(np.sum((shifts(z) / sigma) ** 2)),
        np.minimum(0.1, [np.inf] * (len(c) - 1) + [end]),
        bounds=[(0, None)] * (len(c) - 1) + [(0, end)],
        constraints=[{"type": "ineq", "fun": shifts}],
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert result.success
    return result.fun


@pytest.mark.parametrize("seed", seeds(6))
@pytest.mark.parametrize("steps", [9, 7])
def test_the_cost_of_an_epoch(seed, steps):
    rng = np.random.default_rng(seed)
    process = process_of(rng, steps)
    epochs = EpochCosts.of(process)
    carries = np.append(rng.uniform(0, 2, 3) * (rng.random(3) < 0.8), 0.0)
    found = epochs.costs(carries) * epochs.scale
    for epoch, position in itertools.product(range(3), range(3)):
        ends = carries[epoch : epoch + 2] * process.sensitivity.max()
        least = cost_of_an_epoch(process, epoch, position, *ends)
        assert found[epoch, position] == pytest.approx(least, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize(("period", "contraction"), [(60, 1.3), (120, 1.2), (150, 1.3)])
def test_an_epoch_that_expands_costs_what_theorem_a_says(period, contraction):
    """Between its steps lie up to 34 digits: no weight may be the difference of two others."""
    event = hsa.LastIterateDpEvent(
        noise_multiplier=3.0, learning_rate=contraction - 1, clip_norm=1.0, batch_size=10,
        dataset_size=10 * period, num_steps=2 * period, batch_order="reshuffled",
        loss=hsa.LossGeometry.smooth(smoothness=1.0, lipschitz=1.0), release_steps=[period],
    )  # fmt: skip
    process = noisy_process(event, SPECIAL)
    epochs = EpochCosts.of(process)
    found = epochs.costs(np.zeros(3))[0] * epochs.scale
    expected = segment_mu_squared(process, 0, period, range(period))
    np.testing.assert_allclose(found, expected, rtol=1e-11)


@pytest.mark.parametrize("period", [60, 200, 850])
def test_no_order_costs_more_after_epochs_that_expand(period):
    """A record late in an epoch is far below the rounding of what is carried into it."""
    event = cyclic_run(batch_order="reshuffled", num_steps=3 * period, dataset_size=5 * period)
    process = attrs.evolve(
        noisy_process(event, SPECIAL), contraction=np.full(3 * period, 1.5), is_constant=False
    )
    epochs = EpochCosts.of(process)
    for carries in (best_carries(epochs), np.array([0.0, 0.005, 0.3, 0.0])):
        costs = epochs.costs(carries) * epochs.scale
        for positions in ([0, 0, 0], [period // 2] * 3, [period - 1] * 3, [0, period - 3, 1]):
            moves = pushes(process, positions)
            exact = least_mu_squared(process.contraction, moves, process.noise_std)
            assert exact <= costs[range(3), positions].sum() * (1 + 1e-9)


@pytest.mark.parametrize("steps", [12, 10])
def test_the_curve_is_the_mean_over_all_orders(steps):
    epochs = EpochCosts.of(process_of(np.random.default_rng(5), steps))
    carries = best_carries(epochs)
    costs = epochs.costs(carries) * epochs.scale
    totals = [
        costs[range(4), positions].sum() for positions in itertools.product(range(3), repeat=4)
    ]
    exact = GaussianMixtureCurve(np.full(81, 1 / 81), np.sqrt(totals))
    found = carried_curve(epochs, carries)
    for delta in DELTAS:
        assert exact.epsilon(delta) <= found.epsilon(delta) <= 1.002 * exact.epsilon(delta)


def test_releases_are_shared_states():
    process = process_of(np.random.default_rng(1), 12, releases=(3, 9))
    carries = best_carries(EpochCosts.of(process))
    assert (carries[[0, 1, 3, 4]] == 0).all()
    assert carries[2] > 0


def test_a_falling_learning_rate():
    """About what one kept order gives; without carries it is 3.06 after 45 seconds.

    The one order hides the place in all epochs (Theorem F), the fresh ones in the last alone.
    """
    rates = 0.25 * (1 + np.cos(np.pi * np.arange(20_000) / 20_000))
    fresh, kept = (
        hsa.LastIterateAccountant()
        .compose(probe_run(batch_order=order, learning_rate=rates))
        .get_epsilon(1e-5)
        for order in ("reshuffled", "shuffled_once")
    )
    assert 0.9 * kept < fresh < 1.05 * kept


def test_maps_that_expand():
    """A clip that acts on a convex loss; 5.03 without carries."""
    event = probe_run(
        batch_order="reshuffled", loss=hsa.LossGeometry.convex(0.5), weight_decay=0.01,
        num_steps=5000,
    )  # fmt: skip
    assert hsa.LastIterateAccountant().compose(event).get_epsilon(1e-5) < 4.1


@pytest.mark.parametrize(
    "changes",
    [
        {"learning_rate": [0.5] * 4 + [0.0] * 4 + [0.3] * 16},  # nothing hides the second epoch
        {"learning_rate": [0.5, 0.0, 0.0, 0.0] * 6},
        {"learning_rate": np.geomspace(1e-70, 0.5, 24)},
        {"learning_rate": np.geomspace(0.5, 0.1, 24), "noise_multiplier": 1e-30},
        {"learning_rate": [1.0, 0.5] * 12, "weight_decay": 0.0, "clip_norm": None,
         "loss": hsa.LossGeometry.strongly_convex(1.0, 1.0, lipschitz=1.0)},
        {"noise_multiplier": [2.0] * 23 + [0.0]},
        {"noise_multiplier": [2.0] * 11 + [0.0] + [2.0] * 12},
        {"noise_multiplier": [2.0] * 11 + [0.0] + [2.0] * 12, "release_steps": (12,)},
    ],
    ids=["an empty epoch", "one batch in four", "far apart", "nearly no noise", "forgets all",
         "no noise at the end", "a step without noise", "a release without noise"],
)  # fmt: skip
def test_runs_at_the_edge(changes):
    event = cyclic_run(batch_order="reshuffled", **changes)
    found = Reshuffled().guarantee(event, SPECIAL)
    composition = hsa.bounds.Composition().guarantee(event, SPECIAL)
    for delta in DELTAS:
        assert 0 < found.epsilon(delta) <= composition.epsilon(delta) * (1 + 1e-3)
