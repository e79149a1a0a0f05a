"""Declared runs: validation, equality, serialisation."""

import json
import math
import pickle

import attrs
import dice_events
import dp_accounting
import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from runs import block_run, cyclic_run, full_run

import hidden_state_accountants as hsa
from hidden_state_accountants import BatchOrder, LossGeometry, Schedule

RELATIONS = list(NeighboringRelation)
VARIANTS = {
    cyclic_run: [
        {},
        {"learning_rate": np.linspace(0.5, 0.1, 24)},
        {"learning_rate": [0.5] * 12 + [0.1] * 12, "noise_multiplier": [2.0] * 20 + [3.0] * 4},
        {"clip_norm": None},
        {"clip_norm": [1.0] * 10 + [0.5] * 14, "weight_decay": Schedule([0.1, 0.2], [4, 20])},
        {"domain_diameter": 3.0, "release_steps": (4, 8)},
        {"loss": None},
        {"loss": LossGeometry.strongly_convex(1.0, 0.1, lipschitz=2.0)},
        {"loss": LossGeometry.hoelder(1.0, 0.5)},
        {"batch_order": BatchOrder.POISSON, "max_batch_size": 9},
        {"batch_order": BatchOrder.POISSON, "sampling_rate": 0.3},
        {"noise_multiplier": 0.0},
        {"is_microbatched": True},
    ],
    dice_events.run: [
        {},
        {"gradient_bound": math.inf},
        {"batch_order": "cyclic", "automatic": True},
        {"noise_std": 0.0},
    ],
    block_run: [
        {},
        {"noise_variance": np.exp(np.random.default_rng(0).normal(0, 0.5, (6, 5)))},
        {"noise_variance": [[1.0, 1.0, 1.0, 2.0, 2.0]] * 6, "num_blocks": 3},
        {"block_loss": None, "update_lipschitz": 0.98, "prox_lipschitz": 2.0},
        {"prox_strong_convexity": 0.3, "block_loss": hsa.LossGeometry.convex(1.0, lipschitz=1.0)},
        {"noise_variance": 0.0, "step_size": 0.0},
        {"gradient_sensitivity": None, "clip_norm": 1.0},
    ],
}
EVENTS = [(make, changes) for make, variants in VARIANTS.items() for changes in variants]


@pytest.mark.parametrize(("make", "changes"), EVENTS)
def test_round_trips(make, changes):
    event = make(**changes)
    assert dp_accounting.DpEvent.from_named_tuple(event.to_named_tuple()) == event
    text = json.dumps(event.to_dict(), allow_nan=False)
    assert type(event).from_dict(json.loads(text)) == event
    assert pickle.loads(pickle.dumps(event)) == attrs.evolve(event) == event
    assert hash(make(**changes)) == hash(event)
    assert "\n" not in repr(event)
    assert len(repr(event)) < 500


def test_events_that_differ_are_not_equal():
    assert len({make(**changes) for make, changes in EVENTS}) == len(EVENTS)


def test_equal_schedules_are_equal_however_they_are_written():
    ones = [
        [0.5] * 24,
        tuple([0.5] * 24),
        np.full(24, 0.5),
        Schedule([0.5], [24]),
        Schedule([0.5, 0.5], [20, 4]),
        0.5,
    ]
    assert len({cyclic_run(learning_rate=value) for value in ones}) == 1
    assert cyclic_run(learning_rate=ones[2]).learning_rate == 0.5


def test_string_orders_and_releases_are_canonical():
    assert cyclic_run(batch_order="cyclic") == cyclic_run(batch_order="CYCLIC") == cyclic_run()
    assert cyclic_run(release_steps=[8, 4, 4, 24]).release_steps == (4, 8)
    assert cyclic_run(release_steps=np.array([4, 8])).release_steps == (4, 8)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"noise_multiplier": -1.0}, ValueError, "Expected finite noise_multiplier >= 0, got -1.0"),
        ({"learning_rate": [0.1] * 23}, ValueError, "cover num_steps = 24 steps, got 23"),
        ({"clip_norm": 0.0}, ValueError, "clip_norm > 0"),
        ({"clip_norm": None, "loss": None}, ValueError, "loss.lipschitz when clip_norm is None"),
        ({"batch_order": "sorted"}, ValueError, "batch_order to be one of full, cyclic"),
        ({"batch_order": "full"}, ValueError, "batch_size = dataset_size"),
        ({"loss": 0.5}, TypeError, "LossGeometry"),
        ({"weight_decay": 2.0}, ValueError, "learning_rate \\* weight_decay < 1, got 1"),
        ({"release_steps": (25,)}, ValueError, "release_steps <= 24"),
        ({"release_steps": 5}, TypeError, "not iterable"),
        ({"max_batch_size": 9}, ValueError, "Only POISSON batches and balls in bins vary"),
        ({"sampling_rate": 0.25}, ValueError, "sampling_rate = None for CYCLIC batches, got 0.25"),
        ({"batch_order": "poisson", "sampling_rate": 1.1}, ValueError, "sampling_rate <= 1, got 1"),
        ({"is_microbatched": 2}, TypeError, "is_microbatched to be True or False, got 2"),
    ],
)
def test_bad_values(changes, error, text):
    with pytest.raises(error, match=text):
        cyclic_run(**changes)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"step_size": -0.1}, ValueError, "step_size >= 0"),
        ({"noise_variance": [1.0] * 30}, TypeError, r"shape \(6, 5\)"),
        ({"noise_variance": -np.ones((6, 5))}, ValueError, "noise_variance >= 0"),
        ({"clip_norm": 1.0}, ValueError, "got both"),
        ({"gradient_sensitivity": None}, ValueError, "got neither"),
        ({"block_loss": 1.0}, TypeError, "block_loss.*LossGeometry"),
    ],
)
def test_bad_values_of_blocks(changes, error, text):
    with pytest.raises(error, match=text):
        block_run(**changes)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"clip_norm": 0.0}, ValueError, "clip_norm > 0"),
        ({"gradient_bound": 0.0}, ValueError, "gradient_bound > 0"),
        ({"batch_size": 9}, ValueError, "batch_size <= dataset_size"),
        ({"batch_order": "full"}, ValueError, "CYCLIC"),
    ],
)
def test_bad_values_of_dice(changes, error, text):
    with pytest.raises(error, match=text):
        dice_events.run(**changes)


@pytest.mark.parametrize("make", list(VARIANTS))
def test_missing_and_unknown_keys(make):
    event = make()
    plain = event.to_dict()
    for key in ("batch_size", "dataset_size"):
        less = {name: value for name, value in plain.items() if name != key}
        with pytest.raises(ValueError, match=f"Missing key in {type(event).__name__}: {key}"):
            event.from_dict(less)
    for more in ({"schema": 2}, {"type": "other"}, {"step": 1}):
        with pytest.raises(ValueError, match=r"schema|type|Unknown key"):
            event.from_dict(plain | more)
    with pytest.raises(TypeError, match="dictionary"):
        event.from_dict([])


class TestSchedule:
    def test_is_canonical(self):
        assert Schedule([1, 1, 2], [3, 4, 5]) == Schedule([1.0, 2.0], [7, 5])
        assert Schedule.from_sequence([1, 1, 2]).lengths == (2, 1)
        np.testing.assert_array_equal(Schedule([1, 2], [2, 1]).to_array(), [1.0, 1.0, 2.0])

    @pytest.mark.parametrize(
        ("values", "lengths", "error"),
        [
            ([1.0], [0], ValueError),
            ([-1.0], [1], ValueError),
            ([math.inf], [1], ValueError),
            ([1.0, 2.0], [1], ValueError),
        ],
    )
    def test_bad_values(self, values, lengths, error):
        with pytest.raises(error):
            Schedule(values, lengths)


class TestLossGeometry:
    @pytest.mark.parametrize(
        ("make", "text"),
        [
            (lambda: LossGeometry.convex(-1.0), "smoothness >= 0"),
            (lambda: LossGeometry.strongly_convex(1.0, 0.0), "strong_convexity > 0"),
            (lambda: LossGeometry.strongly_convex(1.0, 2.0), "strong_convexity <= smoothness"),
            (lambda: LossGeometry.hoelder(1.0, 1.5), "exponent <= 1"),
            (lambda: LossGeometry.logistic(0.0), "feature_norm > 0"),
            (lambda: LossGeometry(kind="convex", smoothness=1.0, weak_convexity=1.0), "weak"),
            (lambda: LossGeometry(kind="smooth", smoothness=1.0), "weak_convexity = smoothness"),
            (lambda: LossGeometry(kind="convex", smoothness=1.0, exponent=0.5), "exponent = 1"),
        ],
    )
    def test_bad_values(self, make, text):
        with pytest.raises(ValueError, match=text):
            make()

    def test_ready_made_constants(self):
        assert LossGeometry.logistic(2.0).smoothness == 1.0
        assert LossGeometry.logistic(2.0, bias=True).smoothness == 1.25
        assert LossGeometry.softmax_cross_entropy(1.0) == LossGeometry.convex(0.5, math.sqrt(2))
        assert LossGeometry.squared_error(3.0, scale=2.0).smoothness == 18.0
        assert LossGeometry.squared_error(3.0).lipschitz is None
        assert LossGeometry.huber(3.0, 0.5).lipschitz == 1.5


class TestAsComposition:
    """`as_composition` under stock accountants with ADD_OR_REMOVE_ONE."""

    @staticmethod
    def epsilon(event):
        return dp_accounting.pld.PLDAccountant().compose(event).get_epsilon(1e-5)

    @staticmethod
    def gaussian(mu):
        return hsa.curves.GaussianCurve(mu).epsilon(1e-5)

    @pytest.mark.parametrize("relation", RELATIONS)
    @pytest.mark.parametrize(
        ("changes", "participations"),
        [
            ({}, 6),
            ({"num_steps": 25}, 7),
            ({"num_steps": 2}, 1),
            ({"batch_order": "shuffled_once"}, 6),
            ({"batch_order": "reshuffled", "num_steps": 25}, 7),
        ],
    )
    def test_epoch_orders(self, relation, changes, participations):
        event = cyclic_run(**changes)
        if relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
            with pytest.raises(hsa.UnsupportedRunError, match="REPLACE_SPECIAL"):
                event.as_composition(relation)
            return
        factor = 2 if relation is NeighboringRelation.REPLACE_ONE else 1
        composed = event.as_composition(relation)
        assert composed == dp_accounting.SelfComposedDpEvent(
            dp_accounting.GaussianDpEvent(2.0 / factor), participations
        )
        assert self.epsilon(composed) == pytest.approx(
            self.gaussian(factor / 2.0 * math.sqrt(participations)), rel=1e-4
        )

    @pytest.mark.parametrize("relation", RELATIONS)
    def test_full(self, relation):
        factor = 2 if relation is NeighboringRelation.REPLACE_ONE else 1
        assert full_run().as_composition(relation) == dp_accounting.SelfComposedDpEvent(
            dp_accounting.GaussianDpEvent(2.0 / factor), 24
        )

    def test_gradient_bound_below_the_clip_norm_counts(self):
        event = cyclic_run(clip_norm=4.0)  # the loss is 1-Lipschitz
        assert event.as_composition().event == dp_accounting.GaussianDpEvent(8.0)
        unclipped = cyclic_run(clip_norm=None)
        assert unclipped.as_composition().event == dp_accounting.GaussianDpEvent(2.0)

    def test_schedules_are_one_equivalent_gaussian(self):
        noise = np.array([1.0] * 12 + [2.0] * 12)
        event = cyclic_run(noise_multiplier=noise, learning_rate=[0.5] * 20 + [0.0] * 4)
        mu = math.sqrt(3 * 1.0 + 2 * 0.25)  # the last of the six participations has no effect
        assert event.as_composition().noise_multiplier == pytest.approx(1 / mu)

    def test_worst_position_of_a_schedule(self):
        noise = np.full(24, 2.0)
        noise[1::4] = 1.0
        assert cyclic_run(noise_multiplier=noise).as_composition().noise_multiplier == (
            pytest.approx(1 / math.sqrt(6))
        )

    def test_reshuffled_takes_the_worst_step_of_every_epoch(self):
        noise = np.full(24, 2.0)
        noise[[0, 5, 10]] = 1.0
        event = cyclic_run(noise_multiplier=noise, batch_order="reshuffled")
        assert event.as_composition().noise_multiplier == pytest.approx(1 / math.sqrt(3 + 3 / 4))

    def test_poisson(self):
        event = cyclic_run(batch_order="poisson")
        expected = dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(0.25, dp_accounting.GaussianDpEvent(2.0)), 24
        )
        for relation in (
            NeighboringRelation.ADD_OR_REMOVE_ONE,
            NeighboringRelation.REPLACE_SPECIAL,
        ):
            assert event.as_composition(relation) == expected
        with pytest.raises(hsa.UnsupportedRunError, match="REPLACE_SPECIAL"):
            event.as_composition(NeighboringRelation.REPLACE_ONE)

    @pytest.mark.parametrize("relation", RELATIONS)
    def test_without_replacement_always_counts_two_clip_norms(self, relation):
        event = cyclic_run(batch_order="without_replacement")
        if relation is NeighboringRelation.ADD_OR_REMOVE_ONE:
            with pytest.raises(hsa.UnsupportedRunError):
                event.as_composition(relation)
            return
        composed = event.as_composition(relation)
        assert composed.event.event == dp_accounting.GaussianDpEvent(1.0)
        accountant = dp_accounting.rdp.RdpAccountant(
            neighboring_relation=NeighboringRelation.REPLACE_ONE
        )
        assert accountant.supports(composed)

    def test_nothing_happens(self):
        assert cyclic_run(learning_rate=0.0).as_composition() == dp_accounting.NoOpDpEvent()

    @pytest.mark.parametrize("order", ["cyclic", "shuffled_once", "reshuffled"])
    def test_batches_must_divide_the_data(self, order):
        with pytest.raises(
            hsa.UnsupportedRunError, match=r"divides dataset_size: .* 6 and 20.*=18"
        ):
            cyclic_run(batch_size=6, batch_order=order).as_composition()


@pytest.mark.parametrize("order", ["poisson", "without_replacement"])
def test_sampled_steps_without_learning_rate_are_left_out(order):
    make = {"batch_order": order, "loss": None}
    rates = [0.5] * 9 + [0.0] * 15
    assert (
        cyclic_run(**make, learning_rate=rates).as_composition()
        == cyclic_run(**make, num_steps=9).as_composition()
    )


def test_sampled_steps_of_equal_noise_are_counted():
    noise = [2.0] * 10 + [3.0] * 9 + [2.0] * 5
    event = cyclic_run(batch_order="poisson", loss=None, noise_multiplier=noise)
    assert event.as_composition() == dp_accounting.ComposedDpEvent(
        [
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.PoissonSampledDpEvent(0.25, dp_accounting.GaussianDpEvent(value)),
                count,
            )
            for value, count in ((2.0, 15), (3.0, 9))
        ]
    )
