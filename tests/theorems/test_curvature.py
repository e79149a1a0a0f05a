"""The curvature of a batch: the modulus, exact runs, what is released, and what may fail."""

import itertools
import math

import attrs
import dp_accounting
import numpy as np
import pytest
from cases import seeds
from dp_accounting import NeighboringRelation
from gaussian_oracle import GaussianOracle
from runs import cyclic_run, full_run
from scipy import stats

import hidden_state_accountants as hsa
from hidden_state_accountants.curves.base import GaussianCurve, best_curve, with_delta
from hidden_state_accountants.curves.composed import compose_curves
from hidden_state_accountants.process.batch_curvature import batch_share
from hidden_state_accountants.process.noisy_process import noisy_process

SPECIAL, ONE = NeighboringRelation.REPLACE_SPECIAL, NeighboringRelation.REPLACE_ONE
CONVEX = hsa.LossGeometry.convex(1.0, 1.0)


def unit_rows(rng, records, dimension):
    rows = rng.normal(size=(records, dimension)) * np.geomspace(1, 0.1, dimension)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def largest(rows):
    return np.linalg.eigvalsh(rows.T @ rows / len(rows))[-1]


@pytest.mark.parametrize("seed", seeds(6))
def test_no_batch_of_a_linear_model_is_stretched_more(seed):
    """Softmax cross-entropy at two points, many of them far apart or close together."""
    rng = np.random.default_rng(seed)
    rows, classes = unit_rows(rng, 12, 4), 3
    share = largest(rows)
    loss = hsa.LossGeometry.softmax_cross_entropy(1.0).with_curvature(0.5 * share)
    targets = np.eye(classes)[rng.integers(0, classes, len(rows))]

    def gradient(weights):
        logits = rows @ weights
        shares = np.exp(logits - logits.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        return rows.T @ (shares - targets) / len(rows)

    for eta, decay in itertools.product((1.0, 3.0, 3 / share, 8 / share), (0.0, 0.02)):
        event = full_run(
            loss=loss, learning_rate=eta, weight_decay=decay, clip_norm=2.0, batch_size=12,
            dataset_size=12,
        )  # fmt: skip
        modulus = noisy_process(event, SPECIAL).contraction[0]
        found = 0.0
        for size in (1e-3, 0.3, 3.0):
            one, other = rng.normal(size=(2, 4, classes)) * size
            moved = (1 - eta * decay) * (one - other) - eta * (gradient(one) - gradient(other))
            found = max(found, np.linalg.norm(moved) / np.linalg.norm(one - other))
        assert found <= modulus * (1 + 1e-12)
        assert modulus == pytest.approx(max(1 - eta * decay, eta * (decay + 0.5 * share) - 1))


class TestExactRuns:
    """Quadratics whose curvatures differ inside of a batch, so that steps may be long."""

    @pytest.mark.parametrize("eta", [2.0, 3.0, 3.6, 4.4])
    @pytest.mark.parametrize("decay", [0.0, 0.05])
    def test_two_records_in_a_batch(self, eta, decay):
        """Curvatures 1 and 0: the batch has 1/2, and a step of 4 does not expand."""
        event = hsa.LastIterateDpEvent(
            noise_multiplier=1.0, learning_rate=eta, clip_norm=None, batch_size=2, dataset_size=6,
            num_steps=12, batch_order="cyclic", weight_decay=decay, loss=CONVEX,
        )  # fmt: skip
        known = attrs.evolve(event, loss=CONVEX.with_curvature(0.5))
        claim = hsa.bounds.ShiftedInterpolation().guarantee(known, SPECIAL).mu
        without = hsa.bounds.ShiftedInterpolation().guarantee(event, SPECIAL).mu
        if eta > 2:
            assert claim < 0.9 * without
        exact = 0.0
        for shares in itertools.product((0.0, 0.25, 0.5), repeat=3):
            hessians = np.array([2 * shares[i // 2] * (i % 2) for i in range(6)])
            oracle = GaussianOracle(
                hessians[:, None, None],
                [(1.0, [[2 * (t % 3), 2 * (t % 3) + 1] for t in range(12)])],
                learning_rate=eta, noise_std=1.0, weight_decay=decay, batch_size=2, record=4,
                slope_difference=[1.0],
            )  # fmt: skip
            exact = max(exact, oracle.mu)
        assert 0.7 * claim < exact <= claim * (1 + 1e-12)

    def test_a_curvature_that_does_not_hold_is_refuted(self):
        """The record comes first; then batches of curvature 1 expand, declared as half of it."""
        event = hsa.LastIterateDpEvent(
            noise_multiplier=1.0, learning_rate=3.0, clip_norm=None, batch_size=2, dataset_size=10,
            num_steps=5, batch_order="cyclic", loss=CONVEX.with_curvature(0.5), record_position=0,
        )  # fmt: skip
        claim = hsa.bounds.ShiftedInterpolation().guarantee(event, SPECIAL).mu
        oracle = GaussianOracle(
            np.array([0.0, 0.0, *np.ones(8)])[:, None, None],
            [(1.0, [[2 * t, 2 * t + 1] for t in range(5)])],
            learning_rate=3.0, noise_std=1.0, batch_size=2, record=0, slope_difference=[1.0],
        )  # fmt: skip
        assert oracle.mu > 1.5 * claim

    def test_a_bound_for_the_data_without_the_record(self):
        """Two quadratics: [mu, K] would give c = 0, the attack of docs/theory/curvature.md more.

        Without the record the Hessian is diag(.5, 1) <= K = 1, with it diag(1, 2).
        """
        margin = 1.05  # of the domain, beside six standard deviations of the noise
        noise = np.array([1e-3, 0.01])
        loss = hsa.LossGeometry.strongly_convex(2.0, 1.0, 2 * math.sqrt(5) * margin)
        event = full_run(
            loss=loss.with_curvature(1.0), learning_rate=1.0, clip_norm=None, batch_size=2,
            dataset_size=2, num_steps=2, noise_multiplier=hsa.Schedule(noise, [1, 1]),
            weight_decay=0.0,
        )  # fmt: skip
        maps = []  # x -> a * x + b
        for hessians, minima in (
            ([[1, 2], [1, 2]], [[-4, 1], [0, 0]]),
            ([[1, 2], [0, 0]], [[-4, 1], [0, 0]]),
        ):
            pull = np.mean(np.multiply(hessians, minima), axis=0)
            maps.append((1 - np.mean(hessians, axis=0), pull))
        std = noise * loss.lipschitz / 2
        laws = []
        for a, b in maps:
            first = a * np.array([-4.0, -1.0]) + b
            for point in (np.array([-4.0, -1.0]), first):  # where gradients are taken
                for centre in ([-4, 1], [0, 0]):
                    slope = np.linalg.norm([1, 2] * (point - centre))
                    assert slope + 2 * 6 * std[0] < loss.lipschitz
            laws.append((a * first + b, np.square(a) * std[0] ** 2 + std[1] ** 2))
        apart = laws[1][0] - laws[0][0]
        along = apart / np.linalg.norm(apart)
        spreads = [math.sqrt(along**2 @ variance) for _, variance in laws]

        def attack(epsilon):
            """The halfspaces along the line through both means."""
            cuts = np.linspace(0, np.linalg.norm(apart), 2001)
            inside = stats.norm.cdf(cuts / spreads[0])
            other = stats.norm.logcdf((cuts - cuts[-1]) / spreads[1])
            return float(np.max(inside - np.exp(np.minimum(epsilon + other, 700.0))))

        of_one_step = 1 / noise[1]
        guarantee = hsa.bounds.ShiftedInterpolation().guarantee(event, SPECIAL)
        epsilon = 0.6 * of_one_step**2
        assert GaussianCurve(of_one_step).delta(epsilon) < 1e-6 < 0.9 < attack(epsilon)
        for epsilon in of_one_step**2 * np.linspace(0.4, 1.2, 9):
            assert attack(epsilon) <= guarantee.delta(epsilon)
        replaced = hsa.bounds.ShiftedInterpolation().guarantee(event, ONE)
        assert replaced.mu == pytest.approx(2 * of_one_step)

    @pytest.mark.parametrize("order", ["full", "cyclic"])
    def test_an_audit_attacks_with_members_of_the_class(self, order):
        event = cyclic_run(
            batch_order=order, learning_rate=3.0, loss=CONVEX.with_curvature(0.5, failure=1e-8),
            **({"batch_size": 20} if order == "full" else {}),
        )  # fmt: skip
        guarantee = hsa.LastIterateAccountant(SPECIAL).compose(event).guarantee
        assert not hsa.audit(guarantee, event).violated


class TestWhereItIsUsed:
    def test_not_for_batches_that_vary_in_size(self):
        with_it, without = (
            noisy_process(cyclic_run(batch_order="poisson", learning_rate=3.0, loss=loss),
                            SPECIAL, 7)
            for loss in (CONVEX.with_curvature(0.5), CONVEX)
        )  # fmt: skip
        np.testing.assert_array_equal(with_it.contraction, without.contraction)

    def test_not_where_a_clip_acts_on_several_outputs(self):
        event = cyclic_run(learning_rate=3.0, loss=CONVEX.with_curvature(0.5), clip_norm=0.5)
        free = attrs.evolve(event, loss=CONVEX)
        of_both = [noisy_process(e, SPECIAL).contraction for e in (event, free)]
        np.testing.assert_array_equal(*of_both)

    def test_clipped_scalar_predictions_keep_it(self):
        loss = hsa.LossGeometry.generalized_linear(1.0).with_curvature(0.5)
        for order, relation in (("cyclic", ONE), ("without_replacement", SPECIAL)):
            event = cyclic_run(learning_rate=3.0, loss=loss, batch_order=order, weight_decay=0.1)
            process = (
                noisy_process(event, relation)
                if order == "cyclic"
                else noisy_process(event, relation, event.batch_size)
            )
            np.testing.assert_allclose(process.contraction, 3 * 0.1 + 3 * 0.5 - 1)

    @pytest.mark.parametrize("order", ["cyclic", "shuffled_once", "reshuffled", "full"])
    def test_the_failure_adds_to_delta_once(self, order):
        event = cyclic_run(
            batch_order=order, learning_rate=3.0, loss=CONVEX.with_curvature(0.5),
            weight_decay=0.02, **({"batch_size": 20} if order == "full" else {}),
        )  # fmt: skip
        unsure = attrs.evolve(event, loss=CONVEX.with_curvature(0.5, failure=1e-6))
        for bound in hsa.BOUNDS:
            applies = isinstance(event, bound.event_type) and not bound.check(event, SPECIAL)
            if not (applies and bound.sound):
                continue
            sure, other = (bound.guarantee(e, SPECIAL) for e in (event, unsure))
            extra = 0.0 if bound.name == "composition" else 1e-6
            for epsilon in (0.1, 1.0, 3.0):
                expected = sure.delta(epsilon) + extra
                assert other.delta(epsilon) == pytest.approx(expected, rel=1e-9)
        running = hsa.LastIterateAccountant(SPECIAL).compose(unsure)
        assert running.get_epsilon(9e-7) > running.get_epsilon(1.1e-6)

    @pytest.mark.parametrize("order", ["cyclic", "shuffled_once", "reshuffled"])
    def test_a_released_bound_counts_at_every_delta_above_its_failure(self, order):
        """At a failure of 1e-6, the default, composition used to be all that was left of it.

        Below its failure the run counts as if nothing had been released.
        """
        unsure = CONVEX.with_curvature(0.5, failure=1e-6)
        event = cyclic_run(
            batch_order=order, learning_rate=3.0, weight_decay=0.1, num_steps=200, loss=unsure
        )
        sure = attrs.evolve(event, loss=CONVEX.with_curvature(0.5))
        plain, composed = (attrs.evolve(event, loss=loss) for loss in (CONVEX, None))
        alone, certain, less, every = (
            hsa.LastIterateAccountant(SPECIAL).compose(e) for e in (event, sure, plain, composed)
        )
        assert alone.get_epsilon(1e-5) == pytest.approx(certain.get_epsilon(9e-6), rel=1e-6)
        assert alone.get_epsilon(1e-5) < 0.5 * every.get_epsilon(1e-5)
        assert alone.get_epsilon(1e-6) == less.get_epsilon(1e-6) <= every.get_epsilon(1e-6)
        if order == "cyclic":
            assert less.get_epsilon(1e-6) < 0.9 * every.get_epsilon(1e-6)

        release = dp_accounting.LaplaceDpEvent(20.0)
        both, certain, less, every = (a.compose(release) for a in (alone, certain, less, every))
        assert both.get_epsilon(1e-5) == pytest.approx(certain.get_epsilon(9e-6), rel=1e-6)
        assert both.get_epsilon(1e-5) < 0.6 * every.get_epsilon(1e-5)
        assert both.get_epsilon(1e-6) == pytest.approx(less.get_epsilon(1e-6), rel=1e-9)

        twice = hsa.LastIterateAccountant(SPECIAL).compose(event, 2)
        assert twice.get_epsilon(3e-6) < 0.5 * twice.get_epsilon(2e-6) < math.inf

    @pytest.mark.parametrize("failure", [0.3, 1 - 1e-9, 1.0])
    def test_a_bound_that_fails_too_often_leaves_composition(self, failure):
        event = cyclic_run(learning_rate=3.0, loss=CONVEX.with_curvature(0.5, failure=failure))
        every = hsa.LastIterateAccountant(SPECIAL).compose(attrs.evolve(event, loss=None))
        accountant = hsa.LastIterateAccountant(SPECIAL).compose(event)
        assert accountant.get_epsilon(1e-5) == every.get_epsilon(1e-5)
        accountant.compose(event)
        assert accountant.get_epsilon(1e-5) == every.compose(event).get_epsilon(1e-5)

    def test_what_is_known_of_one_mechanism_alone_bounds_not_two(self):
        fails, sure = with_delta(GaussianCurve(0.1), 1e-6), GaussianCurve(2.0)
        alone = compose_curves([(fails, 1), (sure, 1)])
        assert alone.epsilon(1e-7) == math.inf
        either = best_curve([fails, with_delta(GaussianCurve(1.0), 1e-12)])
        both = compose_curves([(either, 1), (sure, 1)])
        assert both.epsilon(1e-5) == GaussianCurve(math.hypot(0.1, 2.0)).epsilon(9e-6)
        expected = GaussianCurve(math.hypot(1.0, 2.0)).epsilon(1e-7)
        assert expected <= both.epsilon(1e-7) < expected * (1 + 1e-4)
        assert compose_curves([(either, 1), (fails, 1)]).epsilon(1e-7) == math.inf

    @pytest.mark.slow
    def test_beside_a_failure_of_the_batches(self):
        """Overfull batches fail as well; a curvature is declared, and not used."""
        event = cyclic_run(batch_order="poisson", loss=CONVEX, weight_decay=0.3)
        unsure = attrs.evolve(event, loss=CONVEX.with_curvature(0.5, failure=1e-6))
        sure, other = (hsa.bounds.Subsampling().guarantee(e, SPECIAL) for e in (event, unsure))
        assert 0 < sure.delta(60.0) < 1e-12
        assert other.delta(60.0) == pytest.approx(sure.delta(60.0) + 1e-6, rel=1e-9, abs=0)

    def test_smoothing_for_long_steps(self):
        """An envelope that is smoothed for a share of .25: c = 1 - eta w, and no less will do."""
        m = hsa.envelope_smoothing(
            16.0, curvature=0.5, feature_norm=1.0, weight_decay=0.001, batch_share=0.25
        )
        whole = hsa.envelope_smoothing(16.0, curvature=0.5, feature_norm=1.0, weight_decay=0.001)
        assert m + 2 == pytest.approx(0.25 * (whole + 2))
        for smoothing, is_enough in ((m, True), (0.9 * m, False)):
            loss = hsa.LossGeometry.envelope_softmax_cross_entropy(
                1.0, clip_norm=0.3, smoothing=smoothing
            )
            event = cyclic_run(
                loss=loss.with_curvature(0.25 * loss.smoothness), clip_norm=0.3,
                learning_rate=16.0, weight_decay=0.001,
            )  # fmt: skip
            contraction = noisy_process(event, SPECIAL).contraction
            assert (contraction == pytest.approx(1 - 0.016)) == is_enough


class TestDeclaration:
    def test_round_trip(self):
        loss = CONVEX.with_curvature(0.25, failure=1e-7)
        event = cyclic_run(loss=loss)
        assert hsa.LastIterateDpEvent.from_dict(event.to_dict()).loss == loss
        assert repr(loss) == (
            "LossGeometry.convex(smoothness=1.0, lipschitz=1.0).with_curvature(0.25, failure=1e-07)"
        )
        assert eval(repr(loss), {"LossGeometry": hsa.LossGeometry}) == loss

    def test_no_more_than_that_of_a_record(self):
        assert CONVEX.with_curvature(2.0).curvature == 1.0
        assert CONVEX.common_smoothness == 1.0
        assert CONVEX.with_curvature(0.1).common_smoothness == 0.1

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"curvature": -0.1}, "curvature >= 0"),
            ({"curvature": 1.1}, "no mean loss of a batch"),
            ({"curvature": 0.5, "curvature_failure": 2.0}, "curvature_failure"),
            ({"curvature_failure": 0.1}, "without a curvature"),
        ],
    )
    def test_impossible_ones_are_refused(self, changes, text):
        with pytest.raises(ValueError, match=text):
            attrs.evolve(CONVEX, **changes)

    def test_only_of_convex_losses(self):
        with pytest.raises(ValueError, match="convex losses alone"):
            hsa.LossGeometry.smooth(1.0).with_curvature(0.5)


class NoNoise:
    """A generator whose noise is 0, which remembers the scale that it was asked for."""

    def laplace(self, location, scale):
        self.scale = scale
        return location


ORDERS = ["full", "cyclic", "shuffled_once", "reshuffled", "without_replacement"]


class TestRelease:
    def release(self, rows, order="full", *, size=10, **changes):
        arguments = {
            "epsilon": 0.5,
            "batch_order": order,
            "batch_size": size,
            "num_steps": 30,
            "feature_norm": 1.0,
            "failure": 1e-3,
        }
        return hsa.release_curvature(rows, **(arguments | changes))

    @pytest.mark.parametrize("order", ORDERS)
    def test_noise_and_margin(self, order):
        rows, generator = unit_rows(np.random.default_rng(0), 1000, 5), NoNoise()
        found = self.release(rows, order, size=200, generator=generator)
        unit = 200 if order == "cyclic" else 1000
        assert generator.scale == pytest.approx(1 / (unit * 0.5))
        parts = rows.reshape(5, 200, 5) if order == "cyclic" else [rows]
        exact = max(largest(part) for part in parts)
        is_random = order not in ("full", "cyclic")
        tail = 1e-3 / (2 if is_random else 1)
        bound = exact + generator.scale * math.log(1 / (2 * tail))
        if is_random:
            number = 5 if order == "shuffled_once" else 30
            bound = batch_share(bound, 200, number, 5, tail)
        bound += 1 / 200 if order == "without_replacement" else 0
        assert found.share == pytest.approx(bound, abs=2e-8)
        assert found.share >= bound
        assert found.event.noise_multiplier == 2.0
        assert found.failure == 1e-3

    def test_sensitivity(self):
        """A record that is replaced or zeroed moves the eigenvalue by at most 1/n."""
        rng = np.random.default_rng(1)
        moved = []
        for _ in range(300):
            rows = unit_rows(rng, 6, 3)
            if rng.random() < 0.5:  # all but one alike: the eigenvalue moves most
                rows[1:] = rows[1]
            other = rows.copy()
            other[0] = rng.choice([0.0, 1.0]) * rows[1]
            moved.append(abs(largest(rows) - largest(other)))
        assert 0.9 / 6 < max(moved) <= 1 / 6 * (1 + 1e-9)

    @pytest.mark.parametrize("order", ["shuffled_once", "without_replacement"])
    def test_batches_rarely_exceed_the_bound(self, order):
        """A failure of 20 per cent, with rows of few kinds, which makes batches vary most."""
        rng = np.random.default_rng(2)
        rows = np.eye(5)[rng.choice(5, 2000, p=[0.3, 0.3, 0.2, 0.1, 0.1])]
        above = 0
        for seed in range(300):
            found = self.release(
                rows, order, size=400, num_steps=5, failure=0.2, epsilon=2.0,
                generator=np.random.default_rng(seed),
            )  # fmt: skip
            shuffled = rng.permutation(2000).reshape(5, 400)
            above += max(largest(rows[batch]) for batch in shuffled) > found.share
            assert found.share < 0.5
        assert above <= 0.2 * 300

    @pytest.mark.parametrize("whole", [0.02, 0.2])
    @pytest.mark.parametrize("failure", [1e-2, 1e-6])
    def test_the_tail_of_a_batch(self, whole, failure):
        """In one dimension, rows 0 or 1, the number of ones in a batch is hypergeometric."""
        size, records = 200, 2000
        share = batch_share(whole, size, 1, 1, failure)
        law = stats.hypergeom(records, round(whole * records), size)
        tail = law.sf(math.ceil(share * size) - 1)
        assert tail <= failure
        assert batch_share(whole, size, 50, 7, failure) > share > whole

    def test_what_many_records_gain(self):
        rows = unit_rows(np.random.default_rng(3), 20_000, 10)
        shares = {
            order: self.release(rows, order, size=2000, epsilon=0.05, failure=1e-6).share
            for order in ORDERS
        }
        exact = largest(rows)
        assert exact < shares["full"] < 1.1 * exact
        assert all(exact < share < 0.85 for share in shares.values())
        assert self.release(rows[:200], "shuffled_once", size=20, epsilon=0.05).share == 1.0

    def test_bias(self):
        rows = unit_rows(np.random.default_rng(4), 50, 3)
        found = self.release(rows, bias=True, generator=NoNoise(), epsilon=1e9)
        with_ones = np.hstack([rows, np.ones((50, 1))])
        assert found.share == pytest.approx(largest(with_ones) / 2, abs=1e-7)

    @pytest.mark.parametrize(
        ("changes", "text"),
        [
            ({"order": "poisson"}, "fixed size"),
            ({"feature_norm": 0.5}, "norm at most feature_norm = 0.5, got 1"),
            ({"epsilon": 0.0}, "epsilon > 0"),
            ({"failure": 0.0}, "failure > 0"),
            ({"size": 51}, "batch_size"),
        ],
    )
    def test_refused(self, changes, text):
        rows = unit_rows(np.random.default_rng(5), 50, 3)
        with pytest.raises(ValueError, match=text):
            self.release(rows, **changes)

    def test_of_what_has_no_rows(self):
        with pytest.raises(ValueError, match="shape"):
            self.release(np.ones(7))
