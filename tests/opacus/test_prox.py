"""A proximal map after every noisy step: what the event says, and what is refused."""

import numpy as np
import pytest
import torch
from torch import nn

import hidden_state_accountants as hsa
from hidden_state_accountants import Regulariser
from hidden_state_adapters.opacus import (
    BlockCoordinate,
    DiceSGD,
)
from hidden_state_adapters.opacus.composed import ComposedOptimizer
from hidden_state_adapters.opacus.step_maps import TORCH_PROX

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DELTA = 1e-5
PLAIN = {"lr": 0.5, "weight_decay": 0.0}


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


def test_row178_the_event_reads_the_modulus_and_the_map_has_it(make_run):
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


def test_row178_the_map_follows_every_step_at_its_rate(make_run):
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


def test_row179_a_function(make_run, tmp_path):
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


class Own(Regulariser):
    def prox(self, values, step_size, operations):
        return 2 * values


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"after": 0.1}, TypeError, "Expected after to be a hidden_state_accountants.Regulariser"),
        ({"after": Regulariser}, TypeError, "Expected after to be"),
        ({"after": Own(l1=0.1)}, TypeError, "Expected after to be"),
        ({"after": Regulariser(group_lasso=0.1, group_axis=2)}, ValueError, "axis of every param"),
        ({"after": Regulariser(l1=0.1), "mechanism": DiceSGD(), "loss_geometry": None},
         hsa.UnsupportedRunError, "not in the algorithm"),
        ({"after": Regulariser(l1=0.1), "mechanism": BlockCoordinate()},
         hsa.UnsupportedRunError, "has l1, l2 and nonnegative"),
        ({"after": Regulariser(l1=0.1), "optimizer_class": ComposedOptimizer,
          "loss_geometry": None}, hsa.UnsupportedRunError, "every step counts"),
    ],
)  # fmt: skip
def test_arguments(make_run, arguments, error, text):
    with pytest.raises(error, match=text):
        make_run(sgd=PLAIN, **arguments)


def test_momentum_is_refused(make_run):
    with pytest.raises(hsa.UnsupportedRunError, match=r"leave out .*after"):
        make_run(after=Regulariser(l1=0.1), sgd={"momentum": 0.9})
