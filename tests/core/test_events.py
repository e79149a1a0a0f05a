"""Declared runs: validation, equality, serialisation, and the composition that they contain."""

import json
import math
import pickle

import attrs
import dice_events
import dp_accounting
import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, NeighboringRelation, SelfComposedDpEvent
from runs import block_run, cyclic_run, full_run

import hidden_state_accountants as hsa
from hidden_state_accountants import BatchOrder, LossGeometry, Schedule

ADD_OR_REMOVE, ONE, SPECIAL = NeighboringRelation
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
        {"prox_strong_convexity": 0.3, "block_loss": LossGeometry.convex(1.0, lipschitz=1.0)},
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
    assert len(repr(event)) < 500


def test_equality():
    """However a schedule, an order or releases are written."""
    assert len({make(**changes) for make, changes in EVENTS}) == len(EVENTS)
    same = Schedule([0.5, 0.5], [20, 4])
    assert cyclic_run(learning_rate=np.full(24, 0.5)) == cyclic_run(learning_rate=same)
    assert cyclic_run(learning_rate=[0.5] * 24).learning_rate == 0.5
    assert cyclic_run(batch_order="CYCLIC") == cyclic_run(batch_order="cyclic") == cyclic_run()
    for steps in ([8, 4, 4, 24], np.array([4, 8])):
        assert cyclic_run(release_steps=steps).release_steps == (4, 8)
    assert Schedule([1, 1, 2], [3, 4, 5]) == Schedule([1.0, 2.0], [7, 5])
    assert Schedule.from_sequence([1, 1, 2]).lengths == (2, 1)
    np.testing.assert_array_equal(Schedule([1, 2], [2, 1]).to_array(), [1.0, 1.0, 2.0])


@pytest.mark.parametrize(
    ("make", "changes", "text"),
    [
        (cyclic_run, {"noise_multiplier": -1.0}, "Expected finite noise_multiplier >= 0, got -1.0"),
        (cyclic_run, {"learning_rate": [0.1] * 23}, "cover num_steps = 24 steps, got 23"),
        (cyclic_run, {"learning_rate": [0.1] * 25}, "cover num_steps = 24 steps, got 25"),
        (cyclic_run, {"clip_norm": 0.0}, "clip_norm > 0"),
        (cyclic_run, {"clip_norm": None, "loss": None}, "loss.lipschitz when clip_norm is None"),
        (cyclic_run, {"batch_order": "sorted"}, "batch_order to be one of full, cyclic"),
        (cyclic_run, {"batch_order": "full"}, "batch_size = dataset_size"),
        (cyclic_run, {"loss": 0.5}, "LossGeometry"),
        (cyclic_run, {"weight_decay": 2.0}, "learning_rate \\* weight_decay < 1, got 1"),
        (cyclic_run, {"release_steps": (25,)}, "release_steps <= 24"),
        (cyclic_run, {"release_steps": 5}, "not iterable"),
        (cyclic_run, {"max_batch_size": 9}, "Only POISSON batches and balls in bins vary"),
        (cyclic_run, {"sampling_rate": 0.25}, "sampling_rate = None for CYCLIC batches, got 0.25"),
        (cyclic_run, {"batch_order": "poisson", "sampling_rate": 1.1}, "sampling_rate <= 1, got"),
        (cyclic_run, {"batch_order": "balls_in_bins", "sampling_rate": 0.3}, "the number of bins"),
        (cyclic_run, {"is_microbatched": 2}, "is_microbatched to be True or False, got 2"),
        (cyclic_run, {"learning_rate": 1e-200}, "learning_rate between 1e-75 and 1e\\+75, or 0"),
        (cyclic_run, {"learning_rate": [0.5] * 23 + [1e-200]}, "learning_rate between"),
        (cyclic_run, {"clip_norm": 1e-200}, "clip_norm between"),
        (cyclic_run, {"noise_multiplier": 1e200}, "noise_multiplier between"),
        (cyclic_run, {"noise_multiplier": 10**400}, "finite noise_multiplier"),
        (block_run, {"step_size": -0.1}, "step_size >= 0"),
        (block_run, {"noise_variance": [1.0] * 30}, r"shape \(6, 5\)"),
        (block_run, {"noise_variance": -np.ones((6, 5))}, "noise_variance >= 0"),
        (block_run, {"clip_norm": 1.0}, "got both"),
        (block_run, {"gradient_sensitivity": None}, "got neither"),
        (block_run, {"block_loss": 1.0}, "block_loss.*LossGeometry"),
        (dice_events.run, {"clip_norm": 0.0}, "clip_norm > 0"),
        (dice_events.run, {"gradient_bound": 0.0}, "gradient_bound > 0"),
        (dice_events.run, {"batch_size": 9}, "batch_size <= dataset_size"),
        (dice_events.run, {"batch_order": "full"}, "CYCLIC"),
        (Schedule, {"values": [1.0], "lengths": [0]}, "lengths"),
        (Schedule, {"values": [-1.0], "lengths": [1]}, "values"),
        (Schedule, {"values": [math.inf], "lengths": [1]}, "values"),
        (Schedule, {"values": [1.0, 2.0], "lengths": [1]}, "lengths"),
        (LossGeometry.convex, {"smoothness": -1.0}, "smoothness >= 0"),
        (
            LossGeometry.strongly_convex,
            {"smoothness": 1.0, "strong_convexity": 0.0},
            "convexity > 0",
        ),
        (
            LossGeometry.strongly_convex,
            {"smoothness": 1.0, "strong_convexity": 2.0},
            "<= smoothness",
        ),
        (LossGeometry.hoelder, {"constant": 1.0, "exponent": 1.5}, "exponent <= 1"),
        (LossGeometry.logistic, {"feature_norm": 0.0}, "feature_norm > 0"),
        (LossGeometry, {"kind": "convex", "smoothness": 1.0, "weak_convexity": 1.0}, "weak"),
        (LossGeometry, {"kind": "smooth", "smoothness": 1.0}, "weak_convexity = smoothness"),
        (LossGeometry, {"kind": "convex", "smoothness": 1.0, "exponent": 0.5}, "exponent = 1"),
    ],
)
def test_bad_values(make, changes, text):
    with pytest.raises((ValueError, TypeError), match=text):
        make(**changes)


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


class TestAsComposition:
    """`as_composition` under stock accountants with ADD_OR_REMOVE_ONE."""

    @pytest.mark.parametrize(("relation", "factor"), [(SPECIAL, 1), (ONE, 2)])
    @pytest.mark.parametrize(
        ("changes", "participations"),
        [
            ({}, 6),
            ({"num_steps": 25}, 7),
            ({"num_steps": 2}, 1),
            ({"batch_order": "shuffled_once"}, 6),
            ({"batch_order": "reshuffled", "num_steps": 25}, 7),
            ({"batch_order": "full", "batch_size": 20}, 24),
        ],
    )
    def test_participations_are_counted(self, changes, participations, relation, factor):
        assert cyclic_run(**changes).as_composition(relation) == SelfComposedDpEvent(
            GaussianDpEvent(2.0 / factor), participations
        )

    def test_gradient_bound_below_the_clip_norm_counts(self):
        event = cyclic_run(clip_norm=4.0)  # the loss is 1-Lipschitz
        assert event.as_composition().event == GaussianDpEvent(8.0)
        assert cyclic_run(clip_norm=None).as_composition().event == GaussianDpEvent(2.0)

    @pytest.mark.parametrize(
        ("order", "louder", "rates", "mu_squared"),
        [
            # the last of the six participations has no effect
            ("cyclic", range(12), [0.5] * 20 + [0.0] * 4, 3 * 1.0 + 2 * 0.25),
            ("cyclic", range(1, 24, 4), 0.5, 6),
            ("reshuffled", [0, 5, 10], 0.5, 3 + 3 / 4),
        ],
    )
    def test_schedules_are_one_gaussian_of_the_worst_position(
        self, order, louder, rates, mu_squared
    ):
        noise = np.full(24, 2.0)
        noise[louder] = 1.0
        event = cyclic_run(batch_order=order, noise_multiplier=noise, learning_rate=rates)
        found = event.as_composition().noise_multiplier
        assert found == pytest.approx(1 / math.sqrt(mu_squared))

    @pytest.mark.parametrize("relation", [ADD_OR_REMOVE, SPECIAL])
    def test_poisson_steps_of_equal_noise_are_counted(self, relation):
        """Those without a learning rate are left out."""
        noise = [2.0] * 10 + [3.0] * 9 + [2.0] * 5
        rates = [0.5] * 17 + [0.0] * 2 + [0.5] * 5
        event = cyclic_run(
            batch_order="poisson", loss=None, noise_multiplier=noise, learning_rate=rates
        )
        parts = [
            SelfComposedDpEvent(
                dp_accounting.PoissonSampledDpEvent(0.25, GaussianDpEvent(value)), count
            )
            for value, count in ((2.0, 15), (3.0, 7))
        ]
        assert event.as_composition(relation) == dp_accounting.ComposedDpEvent(parts)

    @pytest.mark.parametrize("relation", [ONE, SPECIAL])
    def test_without_replacement_always_counts_two_clip_norms(self, relation):
        event = cyclic_run(batch_order="without_replacement")
        composed = event.as_composition(relation)
        assert composed.event.event == GaussianDpEvent(1.0)
        assert dp_accounting.rdp.RdpAccountant(neighboring_relation=ONE).supports(composed)

    def test_nothing_happens(self):
        assert full_run(learning_rate=0.0).as_composition() == dp_accounting.NoOpDpEvent()

    @pytest.mark.parametrize(
        ("changes", "relation", "text"),
        [
            ({}, ADD_OR_REMOVE, "REPLACE_SPECIAL"),
            ({"batch_order": "without_replacement"}, ADD_OR_REMOVE, "REPLACE_SPECIAL"),
            ({"batch_order": "poisson"}, ONE, "REPLACE_SPECIAL"),
            ({"batch_order": "poisson", "max_batch_size": 12}, SPECIAL, "displace"),
            ({"batch_size": 6}, SPECIAL, r"divides dataset_size: .* 6 and 20.*=18"),
            ({"batch_size": 6, "batch_order": "shuffled_once"}, SPECIAL, "divides dataset_size"),
            ({"batch_size": 6, "batch_order": "reshuffled"}, SPECIAL, "divides dataset_size"),
        ],
    )
    def test_refusals(self, changes, relation, text):
        with pytest.raises(hsa.UnsupportedRunError, match=text):
            cyclic_run(**changes).as_composition(relation)
