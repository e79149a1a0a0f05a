"""DiceSGD through the engine: what is refused, and that no epsilon is left after it."""

import pytest
import torch
from opacus_dice_engine import DELTA
from torch import nn

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import (
    BallProjection,
    Batches,
    DiceAdamOptimizer,
    DiceSGDOptimizer,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


# Softmax cross-entropy on features of norm 1 with a bias: sqrt(2) * sqrt(2).
BOUND = 2.0001


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"optimizer_class": object}, hsa.UnsupportedRunError, "steps of these only"),
        ({"optimizer_class": type("Own", (DiceSGDOptimizer,), {})}, hsa.UnsupportedRunError, "Own"),
        ({"optimizer_class": DiceAdamOptimizer}, hsa.UnsupportedRunError, "Adam or torch.optim.Ad"),
        ({"loss_geometry": hsa.LossGeometry.convex(1.0)}, hsa.UnsupportedRunError, "of the loss"),
        ({"after": BallProjection(5.0)}, hsa.UnsupportedRunError, "not in the algorithm"),
        ({"batch_order": Batches("poisson", max_batch_size=30)}, hsa.UnsupportedRunError,
         "capped batch"),
        ({"schedule": 0.1}, hsa.UnsupportedRunError, "learning rate costs nothing"),
        ({"max_grad_norm": [0.1, 0.1]}, hsa.UnsupportedRunError, "max_grad_norm to be one number"),
        ({"error_max_grad_norm": [0.1]}, TypeError, "error_max_grad_norm to be a real number"),
        ({"error_max_grad_norm": 0.0}, ValueError, "error_max_grad_norm > 0"),
        ({"max_grad_norm": 1e-20, "model": nn.Linear(5, 3)}, ValueError, "underflow"),
        ({"gradient_bound": 0.0}, ValueError, "gradient_bound"),
        ({"gradient_bound": "1"}, TypeError, "gradient_bound"),
        ({"automatic": 1}, TypeError, "automatic to be True or False"),
    ],
)  # fmt: skip
def test_arguments_that_are_refused(make_dice, arguments, error, text):
    with pytest.raises(error, match=text):
        make_dice(**arguments)


def test_a_refused_call_leaves_model_and_optimizer_alone(make_dice):
    model = nn.Linear(5, 3).double()
    with pytest.raises(hsa.UnsupportedRunError):
        make_dice(model=model, after=BallProjection(5.0))
    assert not model._forward_hooks
    make_dice(model=model).epoch()


def test_moments_of_another_run_are_refused(make_run):
    """They may hold gradients without noise: the first step would show them."""
    model = nn.Linear(5, 3)
    used = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 5)).sum().backward()
    used.step()
    with pytest.raises(hsa.UnsupportedRunError, match="took no step, got one with a state"):
        make_run(model=model, optimizer=used, optimizer_class=DiceSGDOptimizer, loss_geometry=None)


def fewer_rows(run):
    run.step([part[:9] for part in next(iter(run.loader))])


def long_gradient(run):
    features, labels = next(iter(run.loader))
    run.optimizer.zero_grad()
    (10 * run.criterion(run.model(features), labels)).backward()
    run.optimizer.step()


def moments_from_elsewhere(run):
    other = torch.optim.SGD(run.plain_model.parameters(), lr=1.0, momentum=0.9)
    run.backward(next(iter(run.loader)))
    for p in run.plain_model.parameters():
        other.state[p]["momentum_buffer"] = p.grad  # as if it had trained without noise
    run.optimizer.load_state_dict(other.state_dict())


# What every optimizer refuses is in tests/misuse/misuse.py.
MISUSE = [
    (moments_from_elsewhere, "moments from elsewhere|with momentum or moments"),
    (long_gradient, "gradient_bound >= .*, the largest gradient of step"),
]

# Refused before a step looked at the records; the model is still that of the last step.
NOTHING_HAPPENED = ["moments_from_elsewhere"]


@pytest.mark.parametrize("epochs", [0, 1])
@pytest.mark.parametrize(("misuse", "text"), MISUSE, ids=[m.__name__ for m, _ in MISUSE])
def test_what_the_loop_does_otherwise(make_dice, misuse, text, epochs):
    """At the first step and in the middle: refused, and then there is no epsilon and no event."""
    generator = torch.Generator().manual_seed(4)
    run = make_dice(gradient_bound=BOUND, noise_generator=generator, grad_sample_mode="hooks")
    for _ in range(epochs):
        run.epoch()
    run.engine.get_epsilon(DELTA) if epochs else None
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        misuse(run)
    if not run.steps or misuse.__name__ in NOTHING_HAPPENED:
        return
    for ask in (run.engine.get_epsilon, run.engine.report, run.engine.compare):
        with pytest.raises(hsa.UnsupportedRunError):
            ask(DELTA)
    with pytest.raises(hsa.UnsupportedRunError):
        run.engine.release()
    with pytest.raises(hsa.UnsupportedRunError, match="was refused or interrupted"):
        _ = run.engine.privacy_event
    with pytest.raises(hsa.UnsupportedRunError):
        run.step(next(iter(run.loader)))
    with pytest.raises(hsa.UnsupportedRunError):
        make_dice(engine=run.engine)


@pytest.mark.parametrize("make", ["make_dice", "make_run"])
def test_a_second_attempt_after_a_refused_first_step(make, request):
    """A refusal may depend on the records: that it did not is the user's word."""
    make = request.getfixturevalue(make)
    run = make()
    with pytest.raises(hsa.UnsupportedRunError, match="expected batch_size = 10"):
        fewer_rows(run)
    again = make(
        engine=run.engine, model=run.model, noise_generator=torch.Generator().manual_seed(2)
    )
    again.epoch()
    assert any("earlier attempt" in a.text for a in again.engine.assumptions)
