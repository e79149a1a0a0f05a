"""Every kind of run: its steps are checked, it becomes its event, and its state goes on."""

import json
import math

import attrs
import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from runs import cyclic_run, full_run

import hidden_state_accountants as hsa
from hidden_state_accountants.best_bound import best_guarantee
from hidden_state_accountants.guarantee import Topic
from hidden_state_accountants.runs.algorithms import BlockCoordinate, DiceSGD, NoisySGD
from hidden_state_accountants.runs.run import (
    BlockCoordinateRun,
    DiceSgdRun,
    LastIterateRun,
    Step,
    run_of,
)

SPECIAL, ONE = NeighboringRelation.REPLACE_SPECIAL, NeighboringRelation.REPLACE_ONE
ADD = NeighboringRelation.ADD_OR_REMOVE_ONE
SETTINGS = {
    LastIterateRun: {
        "batch_order": "cyclic", "batch_size": 5, "dataset_size": 20,
        "loss": hsa.LossGeometry.convex(0.5, lipschitz=1.5),
    },
    DiceSgdRun: {
        "noise_multiplier": 2.0, "clip_norm": 1.5, "error_clip_norm": 0.5, "batch_size": 5,
        "dataset_size": 20, "batch_order": "cyclic", "gradient_bound": 1.5,
    },
    BlockCoordinateRun: {
        "step_size": 0.5, "clip_norm": 1.5, "batch_size": 5, "num_blocks": 1, "dataset_size": 20,
        "block_loss": hsa.LossGeometry.convex(0.5, lipschitz=1.5),
    },
}  # fmt: skip
EVENTS = {
    LastIterateRun: hsa.LastIterateDpEvent(
        noise_multiplier=2.0, learning_rate=0.5, clip_norm=1.5, num_steps=8, release_steps=(3,),
        **SETTINGS[LastIterateRun],
    ),
    DiceSgdRun: hsa.DiceSgdDpEvent(
        noise_std=2.0 * 1.5 / 5, clip_norm=1.5, error_clip_norm=0.5, batch_size=5, dataset_size=20,
        num_steps=8, batch_order="cyclic", gradient_bound=1.5,
    ),
    BlockCoordinateRun: hsa.BlockCoordinateDpEvent(
        noise_variance=0.5 * (2.0 * 1.5 / 5) ** 2 / 2, num_epochs=2,
        **(SETTINGS[BlockCoordinateRun] | {"block_loss": None}),  # a model within the run was seen
    ),
}  # fmt: skip
KINDS = pytest.mark.parametrize("kind", list(SETTINGS), ids=lambda kind: kind.__name__)


def empty(kind, **changes):
    return kind(**(SETTINGS[kind] | changes))


def step(run, **changes):
    arguments = {
        "noise_multiplier": 2.0,
        "clip_norm": 1.5,
        "learning_rate": 0.5,
        "batch": run.num_steps % 4,
        "rows": 5,
        "largest_norm": 1.5 * (1 + 5e-7),  # at the bound, but for rounding
    }
    run.add(Step(**(arguments | changes)))


def trained(kind, steps=8, released=2, **changes):
    run = empty(kind, **changes)
    for t in range(steps):
        step(run)
        if t == released:
            run.release()
            run.release()
    return run


@KINDS
def test_becomes_its_event(kind):
    run = trained(kind)
    assert (run.num_steps, run.release_steps) == (8, (3,))
    assert run.event() == EVENTS[kind]
    with pytest.raises(ValueError, match="at least one"):
        empty(kind).event()


@KINDS
@pytest.mark.parametrize("relation", [SPECIAL, ONE])
def test_the_guarantee_is_that_of_the_event(kind, relation):
    run = trained(kind)
    exact = best_guarantee(run.event(), relation).epsilon(1e-5)
    assert run.guarantee(relation).epsilon(1e-5) == pytest.approx(exact, rel=1e-12)
    for _ in range(4):
        step(run)
    assert run.guarantee(relation).epsilon(1e-5) > exact
    run.check_relation(relation)
    for ask in (run.check_relation, run.guarantee):
        with pytest.raises(hsa.UnsupportedRunError):
            ask(ADD)


ALL, CONSTANT = list(SETTINGS), [DiceSgdRun, BlockCoordinateRun]
REFUSED = [
    (ALL, {"rows": 4}, "step 4 used"),
    (ALL, {"batch": 1}, "step 4 used batch 1, expected batch 3"),
    (ALL, {"largest_norm": 1.6}, "largest gradient of step 4"),
    (ALL, {"largest_norm": math.nan}, "nan"),
    (ALL, {"largest_norm": math.inf}, "largest gradient of step 4"),
    (ALL, {"noise_multiplier": -1.0}, "noise_multiplier"),
    (ALL, {"noise_multiplier": math.nan}, "noise_multiplier"),
    (ALL, {"clip_norm": None}, "clip"),
    (ALL, {"batch": None}, "step 4 used batch None, expected batch 3"),
    (ALL, {"rows": None}, "rows"),
    (CONSTANT, {"clip_norm": 1.0}, "step 4 used"),
    ([BlockCoordinateRun], {"learning_rate": 0.25}, "step 4 used"),
    ([BlockCoordinateRun], {"weight_decay": 0.1}, "step 4 used"),
    ([BlockCoordinateRun], {"weight_decay": math.nan}, "step 4 used"),
    ([DiceSgdRun], {"noise_multiplier": 2.1}, "step 4 used noise of standard deviation"),
    ([LastIterateRun], {"learning_rate": math.inf}, "step 4: .*learning_rate"),
    ([LastIterateRun], {"learning_rate": "0.1"}, "step 4: .*learning_rate"),
    ([LastIterateRun], {"learning_rate": 1e-160}, "learning_rate between"),
    ([LastIterateRun], {"clip_norm": 0.0}, "step 4: .*clip_norm"),
    ([LastIterateRun], {"weight_decay": 2.0}, "learning_rate \\* weight_decay < 1"),
]


@pytest.mark.parametrize(
    ("kind", "changes", "text"),
    [(kind, changes, text) for kinds, changes, text in REFUSED for kind in kinds],
)
def test_another_step_is_refused_and_records_nothing(kind, changes, text):
    run = trained(kind, 3)
    before = run.state_dict()
    with pytest.raises((ValueError, TypeError), match=text):
        step(run, **changes)
    assert run.state_dict() == before
    step(run)  # and the run can go on


def test_what_may_change_from_step_to_step():
    dice = trained(DiceSgdRun, 3)
    step(dice, learning_rate=0.01, weight_decay=0.5)  # computed from noisy updates: free
    blocks = empty(BlockCoordinateRun)
    for noise in (3.0, 3.0, 1.0, 1.0):
        step(blocks, noise_multiplier=noise)
    variances = blocks.event().noise_variances().ravel()
    assert variances[:2] == pytest.approx(9 * variances[2:])


@pytest.mark.parametrize(
    ("kind", "changes", "allowed", "text"),
    [
        (DiceSgdRun, {}, (0, 5, 20), "more rows than dataset_size = 20"),
        (LastIterateRun, {"max_batch_size": 7}, (0, 5, 7), "max_batch_size = 7"),
    ],
)
def test_poisson_rows(kind, changes, allowed, text):
    run = empty(kind, batch_order="poisson", **changes)
    for rows in allowed:
        step(run, rows=rows)
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        step(run, rows=allowed[-1] + 1)
    if changes:
        with pytest.raises(TypeError, match="rows of POISSON"):
            step(run, rows=None)
    assert run.event().num_steps == 3


@pytest.mark.parametrize("released", [0, 2, 6])
def test_models_of_dp_mbcd_within_the_run_cost_composition(released):
    """What hides between the steps was seen; the last model is part of the event anyway."""
    hidden = {"prox_strong_convexity": 2.0}
    for relation in (SPECIAL, ONE):
        seen = trained(BlockCoordinateRun, released=released, **hidden).guarantee(relation)
        last = trained(BlockCoordinateRun, released=7, **hidden).guarantee(relation)
        assert last.mu < 0.99 * seen.mu
        assert "composition" in seen.theorem
        assert seen.mu == pytest.approx((2 if relation is ONE else 1) * math.sqrt(2) / 2.0)


@pytest.mark.parametrize(
    "event",
    [
        full_run(),
        cyclic_run(learning_rate=np.linspace(0.5, 0.1, 24), release_steps=(3, 4, 20)),
        cyclic_run(clip_norm=None),
        cyclic_run(learning_rate=[0.5, 0.3, 0.5, 0.5, 0.3, 0.3, 0.5, 0.7] * 3),
        cyclic_run(noise_multiplier=[1.0] * 7 + [2.0] * 17, domain_diameter=2.0),
        cyclic_run(batch_order="poisson", max_batch_size=7),
        cyclic_run(is_microbatched=True, prox_strong_convexity=0.5),
        cyclic_run(batch_order="poisson", sampling_rate=0.3),
    ],
)
def test_returns_the_event_that_happened(event):
    names = {field.name for field in attrs.fields(type(event)) if field.name != "release_steps"}
    names -= {"num_steps", *LastIterateRun.series}
    run = LastIterateRun(**{name: getattr(event, name) for name in names})
    names = [name for name in run.series if getattr(event, name) is not None]
    columns = [event.per_step(name).tolist() for name in names]
    for t, values in enumerate(zip(*columns, strict=True)):
        given = {"clip_norm": None, **dict(zip(names, values, strict=True))}
        run.add(Step(**given, batch=t % 4, rows=event.batch_size))
        if t + 1 in event.release_steps:
            run.release()
    assert run.event() == event


# Steps that were counted elsewhere

COUNTED = {"noise_multiplier": 2.0, "clip_norm": 1.5, "learning_rate": 0.5, "rows": 5}


@pytest.mark.parametrize("kind", CONSTANT)
def test_counted_steps_are_those_that_were_seen(kind):
    run = empty(kind)
    for steps in (0, 7, 1):
        run.add_counted(Step(**COUNTED), steps)
    assert run.state_dict() == trained(kind, released=None).state_dict()
    with pytest.raises(hsa.UnsupportedRunError, match="used 6 rows, expected batch_size = 5"):
        run.add_counted(Step(**(COUNTED | {"rows": 6})), 4)
    with pytest.raises(ValueError, match="num_steps"):
        run.add_counted(Step(**COUNTED), -1)
    assert run.num_steps == 8


@pytest.mark.parametrize(
    ("changes", "steps", "text"),
    [
        ({"dataset_size": 21}, 8, "which leaves 1 records over"),
        ({}, 6, "whole epochs of 4 steps, got 6"),
        ({"step_size": 1e-60}, 8, "noise_variance"),
    ],
)
def test_counted_steps_of_dp_mbcd_without_an_event(changes, steps, text):
    run = empty(BlockCoordinateRun, **changes)
    values = {"learning_rate": changes.get("step_size", 0.5), "noise_multiplier": 1e-20}
    run.add_counted(Step(**(COUNTED | values)), steps)
    with pytest.raises(ValueError, match=text):
        run.event()


# States


@KINDS
def test_state_through_json(kind):
    run = trained(kind)
    state = json.loads(json.dumps(run.state_dict(), allow_nan=False))
    loaded = empty(kind)
    loaded.load_state_dict(state)
    for copy in (run_of(state), loaded):
        assert type(copy) is kind
        assert copy.state_dict() == run.state_dict()
        assert copy.event() == EVENTS[kind]
        step(copy)
        assert copy.num_steps == 9
    with pytest.raises(ValueError, match="without steps, got one with 8"):
        run.load_state_dict(state)


@KINDS
def test_a_state_holds_nothing_that_was_computed_from_the_records(kind):
    """It is in every public checkpoint; the loss of one record must not show in it."""
    runs = [empty(kind), empty(kind)]
    for run, norm in zip(runs, (0.1, 0.2), strict=True):
        step(run, largest_norm=norm)
    assert runs[0].state_dict() == runs[1].state_dict()


@KINDS
@pytest.mark.parametrize(
    "damage",
    [
        lambda s: s.update(schema=7),
        lambda s: s.pop("declared"),
        lambda s: s["declared"].update(type="GaussianDpEvent"),
        lambda s: s["declared"].pop("type"),
        lambda s: s.update(num_steps=-1),
        lambda s: s.pop("runs"),
    ],
)
def test_what_is_no_state_is_noticed(kind, damage):
    state = trained(kind).state_dict()
    damage(state)
    fresh = empty(kind)
    for load in (run_of, fresh.load_state_dict):
        with pytest.raises((ValueError, TypeError)):
            load(state)
    assert fresh.state_dict() == empty(kind).state_dict()


@KINDS
def test_a_state_of_another_run(kind):
    for other in SETTINGS:
        if other is not kind:
            with pytest.raises(ValueError, match="of another run: expected type"):
                empty(kind).load_state_dict(trained(other).state_dict())
    with pytest.raises(ValueError, match="of another run: expected dataset_size = 40, got 20"):
        empty(kind, dataset_size=40).load_state_dict(trained(kind).state_dict())


# What an algorithm makes of its steps

BATCHES = {
    "batch_order": hsa.BatchOrder.CYCLIC,
    "batch_size": 4,
    "dataset_size": 12,
    "sampling_rate": None,
    "max_batch_size": None,
}
NOISE = {"noise_multiplier": 2.0, "clip_norm": 1.5}
LOGISTIC = hsa.LossGeometry.logistic(1.0)


def event_of(algorithm, rate=0.5, decay=0.1):
    run = algorithm.new_run(BATCHES)
    for number in range(3):
        run.add(algorithm.step(learning_rate=rate, weight_decay=decay, rows=4, batch=number))
    return run.event()


def test_sgd():
    event = event_of(NoisySGD(**NOISE, loss=LOGISTIC, prox_strong_convexity=0.2, radius=3.0))
    assert event == hsa.LastIterateDpEvent(
        noise_multiplier=2.0, clip_norm=1.5, learning_rate=0.5, weight_decay=0.1, batch_size=4,
        dataset_size=12, num_steps=3, batch_order="cyclic", loss=LOGISTIC,
        prox_strong_convexity=0.2, domain_diameter=6.0,
    )  # fmt: skip
    for algorithm in (NoisySGD(**NOISE, other_rule="Adam"), NoisySGD(**NOISE)):
        event = event_of(algorithm, rate=20.0)  # which does not count, with a decay that expands
        assert (event.learning_rate, event.weight_decay, event.loss) == (1.0, 0.0, None)


def test_microbatches_are_composed_under_replace_one_only():
    algorithm = NoisySGD(**NOISE, loss=LOGISTIC, microbatch=2)
    event = event_of(algorithm)
    assert event.loss is None
    with pytest.raises(hsa.UnsupportedRunError, match="REPLACE_ONE"):
        hsa.LastIterateAccountant().compose(event)
    assert any("microbatches of 2 examples" in text for text in algorithm.checked())


def test_dice_sgd():
    algorithm = DiceSGD(**NOISE, error_clip_norm=0.1, gradient_bound=3.0)
    assert event_of(algorithm) == hsa.DiceSgdDpEvent(
        noise_std=0.75, clip_norm=1.5, error_clip_norm=0.1, batch_size=4, dataset_size=12,
        num_steps=3, batch_order="cyclic", gradient_bound=3.0,
    )  # fmt: skip
    with pytest.raises(hsa.UnsupportedRunError, match="max_batch_size = None with DiceSGD, got 6"):
        algorithm.new_run({**BATCHES, "batch_order": hsa.BatchOrder.POISSON, "max_batch_size": 6})


def test_block_coordinate_descent():
    algorithm = BlockCoordinate(**NOISE, step_size=0.5, num_blocks=2, prox_strong_convexity=0.3)
    assert event_of(algorithm, decay=0.0) == hsa.BlockCoordinateDpEvent(
        step_size=0.5, num_blocks=2, num_epochs=1, prox_strong_convexity=0.3, clip_norm=1.5,
        noise_variance=0.5 * (2.0 * 1.5 / 4) ** 2 / 2, batch_size=4, dataset_size=12,
    )  # fmt: skip
    for other in ({"rate": 0.25, "decay": 0.0}, {"decay": 0.1}):
        with pytest.raises(hsa.UnsupportedRunError, match="about constant values"):
            event_of(algorithm, **other)
    with pytest.raises(hsa.UnsupportedRunError, match='got "poisson"'):
        algorithm.new_run({**BATCHES, "batch_order": hsa.BatchOrder.POISSON})


@pytest.mark.parametrize(
    ("algorithm", "topics"),
    [
        (NoisySGD(**NOISE, loss=LOGISTIC, source="of the loss"), [Topic.LOSS]),
        (DiceSGD(**NOISE, error_clip_norm=1, gradient_bound=3, source="it"), [Topic.GRADIENT_NORM]),
        (DiceSGD(**NOISE, error_clip_norm=1, gradient_bound=math.inf, source="it"), []),
        (NoisySGD(**NOISE, loss=LOGISTIC), []),
        (NoisySGD(**NOISE, prox="proximal map of r"), [Topic.REGULARISER]),
    ],
)
def test_what_takes_the_place_of_a_declaration(algorithm, topics):
    assert [a.topic for a in algorithm.derived()][:1] == topics
