"""What follows every noisy step: projections, proximal maps, functions of the user."""

import copy
import math

import numpy as np
import pytest
import torch
from opacus_runs import flat, weights
from torch import nn

import hidden_state_accountants as hsa
from hidden_state_accountants import Regulariser
from hidden_state_adapters.opacus import (
    BallProjection,
    BoxProjection,
    ParameterBallsProjection,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DELTA = 1e-5
FAST, PLAIN = {"lr": 5.0, "weight_decay": 0.0}, {"lr": 0.5, "weight_decay": 0.0}


@pytest.fixture
def make(make_run):
    """A run from small weights, without decay."""

    def make(after, sgd=FAST, **arguments):
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        for p in model.parameters():
            p.data.mul_(0.1)
        return make_run(model=model, after=after, sgd=sgd, **arguments)

    return make


def clamp(params):
    for p in params:
        p.clamp_(-0.1, 0.1)


def threshold(params, step_size):
    for p in params:
        p.copy_(nn.functional.softshrink(p, 0.01 * step_size))


def listed(run):
    return [str(a) for a in run.engine.assumptions]


# --- projections ----------------------------------------------------------------------------------


def parameters(scale, dtype):
    return [nn.Parameter(scale * torch.randn(shape, dtype=dtype)) for shape in ((4, 3), (4,))]


def distance(one, two):
    return np.linalg.norm(flat(one) - flat(two))


SETS = [
    BallProjection(0.7),
    BoxProjection(-0.1, 0.3),
    BoxProjection(0.0, math.inf),
    ParameterBallsProjection(0.3),
    ParameterBallsProjection([0.3, 0.8]),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("projection", SETS, ids=repr)
def test_nonexpansive_into_a_set_of_the_diameter(projection, dtype):
    torch.manual_seed(0)
    slack = 1 + 8 * torch.finfo(dtype).eps
    for scale in (0.05, 0.3, 3.0) * 6:
        one, two = parameters(scale, dtype), parameters(scale, dtype)
        before = distance(one, two)
        projection.apply(one, 1.0)
        projection.apply(two, 1.0)
        assert distance(one, two) <= min(before, projection.diameter(one)) * slack
        again = copy.deepcopy(one)
        projection.apply(again, 1.0)
        assert distance(one, again) <= 4 * torch.finfo(dtype).eps * (1 + scale)
        projection.start(one, 1.0)
    far = parameters(-50.0, dtype)
    with pytest.raises(hsa.UnsupportedRunError, match="initial model inside"):
        projection.start(far, 1.0)
    opposite = [nn.Parameter(-p.detach()) for p in far]
    if projection.diameter(far) < math.inf:
        projection.apply(far, 1.0)
        projection.apply(opposite, 1.0)
        assert distance(far, opposite) > 0.9 * projection.diameter(far)


def test_the_ends_of_a_box_are_not_rounded_outwards():
    param = nn.Parameter(torch.tensor([-5.0, 5.0]))
    BoxProjection(-0.1, 0.1).apply([param], 1.0)
    assert -0.1 <= float(param[0]) < float(param[1]) <= 0.1


@pytest.mark.parametrize(
    ("projection", "diameter"),
    [
        (BoxProjection(-0.1, 0.1), 0.2 * math.sqrt(18)),
        (ParameterBallsProjection((0.3, 0.4)), 1.0),
        (BallProjection(0.5), 1.0),
    ],
    ids=repr,
)
def test_the_event_has_the_diameter(make, projection, diameter):
    run = make(projection)
    run.epoch()
    event = run.engine.privacy_event
    assert event.domain_diameter == pytest.approx(diameter, rel=1e-12)
    expected = hsa.LastIterateAccountant().compose(event).get_epsilon(DELTA)
    assert run.engine.get_epsilon(DELTA) == pytest.approx(expected, rel=1e-12)
    again = copy.deepcopy(list(run.plain_model.parameters()))
    projection.apply(again, 1.0)
    np.testing.assert_allclose(weights(run), flat(again), rtol=1e-6)
    assert f"checked: projected on {projection}" in listed(run)


def test_a_prox_and_a_projection_in_any_order(make):
    prox, ball = Regulariser(l2=0.1), BallProjection(2.0)
    runs = [make(after) for after in ([prox, ball], [ball, prox])]
    for run in runs:
        run.epoch()
        assert run.engine.privacy_event.prox_strong_convexity == 0.1
        assert run.engine.privacy_event.domain_diameter == 4.0
        assert list(run.optimizer.run.declared.maps) == ["prox", "projection"]
    assert runs[0].optimizer.run.fields == runs[1].optimizer.run.fields


# --- proximal maps --------------------------------------------------------------------------------


def test_the_event_reads_the_modulus_and_the_map_has_it(make):
    """The figure is that of the event, and smaller than without the map."""
    figures = []
    for after in (None, Regulariser(l1=0.01), Regulariser(l1=0.01, l2=0.5)):
        run = make(after, PLAIN)
        for _ in range(3):
            run.epoch()
        event = run.engine.privacy_event
        assert event.prox_strong_convexity == (after.l2 if after else 0.0)
        expected = hsa.LastIterateAccountant().compose(event).get_epsilon(DELTA)
        figures.append(run.engine.get_epsilon(DELTA))
        assert figures[-1] == pytest.approx(expected, rel=1e-12)
    assert figures[2] < 0.95 * figures[1]
    assert figures[1] == figures[0]
    lines = [line for line in listed(run) if "proximal map" in line]
    assert len(lines) == 1
    assert lines[0].startswith("checked: after the noise of every step")


@pytest.mark.parametrize(("reduction", "scale"), [("mean", 1), ("sum", 10)])
def test_the_map_follows_every_step_at_its_rate(make, reduction, scale):
    """The threshold is that of the step; a sum has the step size of a mean."""
    run = make(
        Regulariser(l1=100.0), {"lr": 1e-7 / scale, "weight_decay": 0.0},
        criterion=nn.CrossEntropyLoss(reduction=reduction), loss_reduction=reduction,
    )  # fmt: skip
    batches, before = iter(run.loader), weights(run)
    run.step(next(batches))
    assert 0 < abs(weights(run) - before).max() < 1e-4
    for group in run.optimizer.param_groups:
        group["lr"] = 0.5 / scale
    run.step(next(batches))
    assert not weights(run).any()
    assert run.engine.privacy_event.per_step("learning_rate") == pytest.approx([1e-7, 0.5])


# --- functions of the user, and what is refused ---------------------------------------------------

DIAMETER = 0.2 * math.sqrt(18)


@pytest.mark.parametrize(
    ("function", "known", "declared", "other"),
    [
        (
            (clamp, DIAMETER),
            BoxProjection(-0.1, 0.1),
            "declared: projected on the set of projection=clamp",
            "expected projection = 'the box from",
        ),
        (
            threshold,
            Regulariser(l1=0.01),
            "declared: after the noise of every step acts prox=thr",
            r"expected prox = 'Regulariser\(l1=0.01\)'",
        ),
    ],
)
def test_a_function(make, tmp_path, function, known, declared, other):
    run, same = (
        make(after, noise_generator=torch.Generator().manual_seed(1)) for after in (function, known)
    )
    for each in (run, same):
        each.epoch()
    np.testing.assert_allclose(weights(run), weights(same), atol=1e-6)
    assert run.engine.get_epsilon(DELTA) == pytest.approx(same.engine.get_epsilon(DELTA))
    assert any(line.startswith(declared) for line in listed(run))
    run.engine.save_checkpoint(path=tmp_path / "c.pt")
    resumed = make(function)
    resumed.engine.load_checkpoint(path=tmp_path / "c.pt")
    resumed.epoch()
    assert resumed.steps == 12
    with pytest.raises(ValueError, match=other):
        make(known).engine.load_checkpoint(path=tmp_path / "c.pt")


def to_the_left(params):
    """Moves again what it moved."""
    for p in params:
        p.sub_(0.01)


def replaced(params):
    for place, p in enumerate(params):
        params[place] = p.clamp(-9, 9)


class Own(BoxProjection):
    def apply(self, params, step_size):
        pass


class OwnProx(Regulariser):
    def prox(self, values, step_size, operations):
        return 2 * values


@pytest.mark.parametrize(
    ("after", "error", "text"),
    [
        (1.0, TypeError, "Expected after to be"),
        ((clamp, None), TypeError, "Expected after to be"),
        (Own(-9, 9), TypeError, "Expected after to be"),
        (Regulariser, TypeError, "Expected after to be"),
        (OwnProx(l1=0.1), TypeError, "Expected after to be"),
        ([BallProjection(2.0), BoxProjection(-9, 9)], TypeError, "a prox and a projection"),
        (BoxProjection(-0.01, 0.01), hsa.UnsupportedRunError, "initial model inside"),
        (ParameterBallsProjection(0.01), hsa.UnsupportedRunError, "initial model inside"),
        ((to_the_left, math.inf), hsa.UnsupportedRunError, "initial model inside"),
        ((clamp, -1.0), ValueError, "the projection > 0"),
        (ParameterBallsProjection([1.0]), ValueError, "each of the 2 trainable"),
        ((lambda params: [p.clamp(-9, 9) for p in params], 1.0), TypeError, "in place and to"),
        ((replaced, 1.0), TypeError, "in place and to"),
        (Regulariser(group_lasso=0.1, group_axis=2), ValueError, "axis of every param"),
    ],
)
def test_arguments(make, after, error, text):
    with pytest.raises(error, match=text):
        make(after)


@pytest.mark.parametrize(
    ("make_set", "text"),
    [
        (lambda: BoxProjection(1.0, 1.0), "low < high"),
        (lambda: BallProjection(0.0), "radius > 0"),
        (lambda: ParameterBallsProjection([1.0, -1.0]), "radius > 0"),
    ],
)
def test_impossible_sets(make_set, text):
    with pytest.raises(ValueError, match=text):
        make_set()
