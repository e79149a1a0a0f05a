"""What follows every noisy step: projections, proximal maps, functions of the user."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import hidden_state_accountants as hsa
from hidden_state_accountants import Regulariser
from hidden_state_adapters.opacus import (
    BallProjection,
    BlockCoordinate,
    BoxProjection,
    DiceSGD,
    ParameterBallsProjection,
)
from hidden_state_adapters.opacus.composed import ComposedOptimizer
from hidden_state_adapters.opacus.step_maps import TORCH_PROX

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DELTA = 1e-5
FAST, PLAIN = {"lr": 5.0, "weight_decay": 0.0}, {"lr": 0.5, "weight_decay": 0.0}


def small():
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    for p in model.parameters():
        p.data.mul_(0.1)
    return model


def parameters(scale, dtype):
    return [nn.Parameter(scale * torch.randn(4, 3, dtype=dtype)),
            nn.Parameter(scale * torch.randn(4, dtype=dtype))]  # fmt: skip


def clamp(params):
    for p in params:
        p.clamp_(-0.1, 0.1)


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
    for scale in (0.05, 0.3, 3.0):
        for _ in range(6):
            one, two = parameters(scale, dtype), parameters(scale, dtype)
            before = distance(one, two)
            projection.apply(one, 1.0)
            projection.apply(two, 1.0)
            assert distance(one, two) <= before * slack
            assert distance(one, two) <= projection.diameter(one) * slack
            again = [nn.Parameter(p.detach().clone()) for p in one]
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


def distance(one, two):
    pairs = zip(one, two, strict=True)
    return math.sqrt(sum(float((p - q).detach().double().square().sum()) for p, q in pairs))


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
def test_the_event_has_the_diameter(make_run, projection, diameter):
    run = make_run(model=small(), after=projection, sgd=FAST)
    run.epoch()
    event = run.engine.privacy_event
    assert event.domain_diameter == pytest.approx(diameter, rel=1e-12)
    expected = hsa.LastIterateAccountant().compose(event).get_epsilon(DELTA)
    assert run.engine.get_epsilon(DELTA) == pytest.approx(expected, rel=1e-12)
    again = [nn.Parameter(p.detach().clone()) for p in run.plain_model.parameters()]
    projection.apply(again, 1.0)
    for p, other in zip(run.plain_model.parameters(), again, strict=True):
        np.testing.assert_allclose(p.detach(), other.detach(), rtol=1e-6)
    assert f"checked: projected on {projection}" in map(str, run.engine.assumptions)
    assert not any("declared: every iterate is projected" in str(a) for a in run.engine.assumptions)


def test_a_prox_and_a_projection_in_any_order(make_run):
    prox, ball = hsa.Regulariser(l2=0.1), BallProjection(2.0)
    runs = [make_run(model=small(), after=after) for after in ([prox, ball], [ball, prox])]
    for run in runs:
        run.epoch()
        assert run.engine.privacy_event.prox_strong_convexity == 0.1
        assert run.engine.privacy_event.domain_diameter == 4.0
        assert list(run.optimizer.run.declared.maps) == ["prox", "projection"]
    assert runs[0].optimizer.run.fields == runs[1].optimizer.run.fields


# --- a function of the user ---------------------------------------------------------------------

DIAMETER = 0.2 * math.sqrt(18)


def test_a_function(make_run, tmp_path):
    arguments = {"model": small(), "after": (clamp, DIAMETER)}
    run = make_run(sgd=FAST, **arguments)
    run.epoch()
    box = make_run(model=small(), after=BoxProjection(-0.1, 0.1), sgd=FAST)
    box.epoch()
    assert run.engine.get_epsilon(DELTA) == pytest.approx(box.engine.get_epsilon(DELTA))
    listed = [str(a) for a in run.engine.assumptions]
    assert any(a.startswith("declared: projected on the set of projection=clamp") for a in listed)
    run.engine.save_checkpoint(path=tmp_path / "c.pt")
    resumed = make_run(sgd=FAST, **{**arguments, "model": small()})
    resumed.engine.load_checkpoint(path=tmp_path / "c.pt")
    resumed.epoch()
    assert resumed.steps == 12
    other = make_run(model=small(), after=BoxProjection(-0.1, 0.1), sgd=FAST)
    with pytest.raises(ValueError, match="expected projection = 'the box from"):
        other.engine.load_checkpoint(path=tmp_path / "c.pt")


def to_the_left(params):
    """Moves again what it moved."""
    for p in params:
        p.sub_(0.01)


def test_an_initial_model_outside_of_the_set_of_a_function(make_run):
    with pytest.raises(hsa.UnsupportedRunError, match="initial model inside"):
        make_run(model=small(), after=(to_the_left, math.inf), sgd={"lr": 0.5})


def test_a_function_of_the_model_itself(make_run):
    """It acts on the same tensors; only the look at the start sees no difference."""
    weights = []
    for is_own in (True, False):
        model = small()

        def project(params, model=model if is_own else None):
            clamp(params if model is None else list(model.parameters()))

        run = make_run(model=model, after=(project, DIAMETER), sgd=FAST, noise_multiplier=0.0)
        run.epoch()
        weights.append(model.weight.detach())
    assert float(weights[0].abs().max()) == pytest.approx(0.1)
    assert torch.equal(*weights)


class Own(BoxProjection):
    def apply(self, params, step_size):
        pass


def replaced(params):
    for place, p in enumerate(params):
        params[place] = p.clamp(-9, 9)


@pytest.mark.parametrize(
    ("after", "error", "text"),
    [
        (1.0, TypeError, "Expected after to be"),
        ((clamp, None), TypeError, "Expected after to be"),
        (Own(-9, 9), TypeError, "Expected after to be"),
        ([BallProjection(2.0), BoxProjection(-9, 9)], TypeError, "a prox and a projection"),
        (BoxProjection(-0.01, 0.01), hsa.UnsupportedRunError, "initial model inside"),
        (ParameterBallsProjection(0.01), hsa.UnsupportedRunError, "initial model inside"),
        ((clamp, -1.0), ValueError, "the projection > 0"),
        (ParameterBallsProjection([1.0]), ValueError, "each of the 2 trainable"),
        ((lambda params: [p.clamp(-9, 9) for p in params], 1.0), TypeError, "in place and to"),
        ((replaced, 1.0), TypeError, "in place and to"),
    ],
)  # fmt: skip
def test_arguments(make_run, after, error, text):
    with pytest.raises(error, match=text):
        make_run(after=after)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: BoxProjection(1.0, 1.0), ValueError, "low < high"),
        (lambda: BallProjection(0.0), ValueError, "radius > 0"),
        (lambda: ParameterBallsProjection([1.0, -1.0]), ValueError, "radius > 0"),
    ],
)
def test_impossible_sets(make, error, text):
    with pytest.raises(error, match=text):
        make()


# --- proximal maps --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "h",
    [
        Regulariser(l1=0.3, l2=0.2),
        Regulariser(group_lasso=0.3, group_axis=1),
        Regulariser(group_lasso=0.3, l1=0.1, low=0.0),
        Regulariser(low=-0.2, high=0.5),
    ],
    ids=str,
)
def test_tensors_as_numpy(h, dtype):
    x = torch.randn(4, 3, dtype=dtype, generator=torch.Generator().manual_seed(0))
    found = h.prox(x, 0.7, TORCH_PROX)
    assert found.dtype == dtype
    eps = torch.finfo(dtype).eps
    np.testing.assert_allclose(found, h.prox(x.double().numpy(), 0.7), rtol=8 * eps, atol=8 * eps)


def test_the_event_reads_the_modulus_and_the_map_has_it(make_run):
    """The figure is that of the event, and smaller than without the map."""
    figures = []
    for l2 in (0.0, 0.5):
        run = make_run(after=Regulariser(l1=0.01, l2=l2), sgd=PLAIN)
        for _ in range(3):
            run.epoch()
        event = run.engine.privacy_event
        assert event.prox_strong_convexity == l2
        expected = hsa.LastIterateAccountant().compose(event).get_epsilon(DELTA)
        figures.append(run.engine.get_epsilon(DELTA))
        assert figures[-1] == pytest.approx(expected, rel=1e-12)
        listed = [str(a) for a in run.engine.assumptions]
        assert sum("proximal map" in a for a in listed) == 1
        assert any(a.startswith("checked: after the noise of every step") for a in listed)
    assert figures[1] < 0.95 * figures[0]
    plain = make_run(sgd=PLAIN)
    for _ in range(3):
        plain.epoch()
    assert figures[0] == plain.engine.get_epsilon(DELTA)


def test_the_map_follows_every_step_at_its_rate(make_run):
    """A step that shrinks the rate has the smaller threshold; a sum has the step size of a mean."""
    for reduction in ("mean", "sum"):
        scale = 1 if reduction == "mean" else 10
        run = make_run(
            criterion=nn.CrossEntropyLoss(reduction=reduction), loss_reduction=reduction,
            after=Regulariser(l1=100.0), sgd={"lr": 0.5 / scale, "weight_decay": 0.0},
        )  # fmt: skip
        batches = iter(run.loader)
        run.step(next(batches))
        assert all(float(p.detach().abs().max()) == 0 for p in run.plain_model.parameters())
        for group in run.optimizer.param_groups:
            group["lr"] = 1e-7 / scale
        with torch.no_grad():
            before = [p.clone() for p in run.plain_model.parameters()]
        run.step(next(batches))
        after = list(run.plain_model.parameters())
        assert all(torch.allclose(p, q, atol=1e-4) for p, q in zip(before, after, strict=True))
        assert run.engine.privacy_event.per_step("learning_rate") == pytest.approx([0.5, 1e-7])


def threshold(params, step_size):
    for p in params:
        p.copy_(nn.functional.softshrink(p, 0.01 * step_size))


def test_a_prox_of_ones_own(make_run, tmp_path):
    run = make_run(after=threshold, sgd=PLAIN)
    run.epoch()
    known = make_run(after=Regulariser(l1=0.01), sgd=PLAIN)
    known.epoch()
    assert run.engine.privacy_event == known.engine.privacy_event
    listed = [str(a) for a in run.engine.assumptions]
    assert any(
        a.startswith("declared: after the noise of every step acts prox=thr") for a in listed
    )
    run.engine.save_checkpoint(path=tmp_path / "c.pt")
    again = make_run(after=threshold, sgd=PLAIN)
    again.engine.load_checkpoint(path=tmp_path / "c.pt")
    again.epoch()
    assert again.steps == 12
    other = make_run(after=Regulariser(l1=0.01), sgd=PLAIN)
    with pytest.raises(ValueError, match=r"expected prox = 'Regulariser\(l1=0.01\)'"):
        other.engine.load_checkpoint(path=tmp_path / "c.pt")


class OwnProx(Regulariser):
    def prox(self, values, step_size, operations):
        return 2 * values


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"after": Regulariser}, TypeError, "Expected after to be"),
        ({"after": OwnProx(l1=0.1)}, TypeError, "Expected after to be"),
        ({"after": Regulariser(group_lasso=0.1, group_axis=2)}, ValueError, "axis of every param"),
        ({"after": Regulariser(l1=0.1), "mechanism": DiceSGD(), "loss_geometry": None},
         hsa.UnsupportedRunError, "not in the algorithm"),
        ({"after": Regulariser(l1=0.1), "mechanism": BlockCoordinate()},
         hsa.UnsupportedRunError, "has l1, l2 and nonnegative"),
        ({"after": Regulariser(l1=0.1), "optimizer_class": ComposedOptimizer,
          "loss_geometry": None}, hsa.UnsupportedRunError, "every step counts"),
    ],
)  # fmt: skip
def test_arguments_of_a_prox(make_run, arguments, error, text):
    with pytest.raises(error, match=text):
        make_run(sgd=PLAIN, **arguments)


def test_momentum_is_refused(make_run):
    with pytest.raises(hsa.UnsupportedRunError, match=r"leave out .*after"):
        make_run(after=Regulariser(l1=0.1), sgd={"momentum": 0.9})
