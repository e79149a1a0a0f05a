"""accountant="hidden_state" in Opacus' own engine: what is declared, what is noticed."""

import math
import warnings

import dp_accounting
import pytest
import torch
from opacus import PrivacyEngine
from opacus.accountants import create_accountant
from opacus.accountants.utils import get_noise_multiplier
from opacus_stock import DECLARED, DELTA, drawn, epsilon, event, resume, secret_generator, step
from torch import nn

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import HiddenStateAccountant

pytestmark = pytest.mark.filterwarnings("ignore:Secure RNG", "ignore:Full backward hook")


def test_registered():
    assert isinstance(create_accountant("hidden_state"), HiddenStateAccountant)
    assert HiddenStateAccountant.mechanism() == "hidden_state"


def test_declared_run(train):
    engine, *_ = train(DECLARED)
    accountant = engine.accountant
    assert engine.get_epsilon(DELTA) == epsilon(event())
    assert accountant.get_epsilon(delta=DELTA, anything="else") == epsilon(event())
    assert accountant.history == [(2.0, 1 / 6, 12)]
    assert len(accountant) == 12
    assert accountant.guarantee.theorem.startswith("Theorem A")


@pytest.mark.parametrize(
    ("optimizer", "arguments", "text"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.5, momentum=0.9), {}, "momentum"),
        (lambda p: torch.optim.Adam(p), {}, "Adam"),
        (
            lambda p: torch.optim.SGD(p, lr=0.5),
            {"clipping": "per_layer", "max_grad_norm": [1.0, 1.0]},
            "DPPerLayerOptimizer",
        ),
    ],
)
def test_other_optimizers_are_composed(train, caplog, optimizer, arguments, text):
    with caplog.at_level("INFO", "hidden_state_accountants"):
        engine, *_ = train(DECLARED, optimizer=optimizer, **arguments)
    assert engine.get_epsilon(DELTA) == epsilon(event(loss=None, weight_decay=0.0))
    assert engine.accountant.guarantee.mu == pytest.approx(math.sqrt(2) / 2)
    lines = [r.message for r in caplog.records if r.name == "hidden_state_accountants"]
    assert len(lines) == 1
    assert text in lines[0]
    assert "composition" in lines[0]
    assert lines[0].count("no last-iterate theorem") + lines[0].count("No last-iterate") == 1


def test_momentum_mid_run_raises(train):
    _, model, private, batches = train(DECLARED)
    private.param_groups[0]["momentum"] = 0.9
    with pytest.raises(hsa.UnsupportedRunError, match="step 13 changed the optimizer"):
        step(model, private, batches)


@pytest.mark.parametrize("order", ["cyclic", "poisson"])
def test_ghost_clipping_is_composed(make_loader, order):
    model = nn.Linear(5, 3)
    engine = PrivacyEngine(accountant="hidden_state")
    model, private, criterion, batches = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        criterion=nn.CrossEntropyLoss(),
        data_loader=make_loader(),
        noise_multiplier=2.0,
        max_grad_norm=1.0,
        poisson_sampling=order == "poisson",
        grad_sample_mode="ghost",
    )
    engine.accountant.declare_run(**{**DECLARED, "batch_order": order})
    features, labels = next(iter(batches))
    criterion(model(features), labels).backward()
    private.step()
    composed = event(batch_order=order, num_steps=1, loss=None, weight_decay=0.0)
    assert engine.get_epsilon(DELTA) == epsilon(composed)


@pytest.mark.parametrize("declared", [DECLARED, None])
def test_adaptive_clipping_is_refused(train, declared):
    with pytest.raises(hsa.UnsupportedRunError, match="step 1 uses adaptive clipping"):
        train(
            declared,
            poisson_sampling=declared is None,
            clipping="adaptive",
            target_unclipped_quantile=0.5,
            clipbound_learning_rate=0.2,
            max_clipbound=10.0,
            min_clipbound=0.1,
            unclipped_num_std=2.0,
        )


def test_what_the_accountant_cannot_see_is_declared(train):
    engine, *_ = train(DECLARED)
    plain = HiddenStateAccountant()
    plain.load_state_dict(engine.accountant.state_dict())
    resumed, *_ = resume(train, engine, DECLARED, "sgd")
    for accountant in (engine.accountant, plain, resumed.accountant):
        lines = [str(assumption) for assumption in accountant.guarantee.assumptions]
        assert len(set(lines)) == len(lines)
        (line,) = [line for line in lines if "clipped per-example gradients are right" in line]
        for text in ("declared: ", "every batch", "of one record", "initial"):
            assert text in line


@pytest.mark.filterwarnings("ignore:No run was declared")
@pytest.mark.parametrize("declared", [{**DECLARED, "loss_geometry": None}, None])
def test_a_refused_step_ends_the_run(train, declared):
    """Which step a loop leaves out would depend on the record."""
    coins = {"generator": torch.Generator().manual_seed(2**62)}  # no batch of it is empty
    engine, *run = train(declared, poisson_sampling=declared is None, loader=coins)
    with pytest.raises(hsa.UnsupportedRunError, match="step 13 has a gradient that is not finite"):
        step(*run, factor=math.inf)
    resumed = HiddenStateAccountant()
    resumed.load_state_dict(engine.accountant.state_dict())
    ended = "which ended it: step 13 has a gradient that is not finite"
    for go_on in (
        lambda: step(*run),
        lambda: engine.get_epsilon(DELTA),
        lambda: resumed.get_epsilon(DELTA),
    ):
        with pytest.raises(hsa.UnsupportedRunError, match=ended):
            go_on()


def test_a_clip_norm_at_the_bound_raises(train):
    with pytest.raises(hsa.UnsupportedRunError, match="Raise max_grad_norm"):
        train(DECLARED, max_grad_norm=2.0)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"batch_order": "sorted"}, ValueError, "batch_order to be one of full, cyclic"),
        ({"loss_geometry": "convex"}, TypeError, "LossGeometry"),
    ],
)
def test_declarations_that_are_refused(train, changes, error, text):
    with pytest.raises(error, match=text):
        train({**DECLARED, **changes}, epochs=0)


def test_a_fixed_order_that_is_kept_secret(train):
    engine, *_ = train({**DECLARED, "batch_order": "shuffled_once"})
    assert engine.get_epsilon(DELTA) == epsilon(event(batch_order="shuffled_once"))
    assert "nobody ever learns it or its seed" in engine.accountant.guarantee.explain()


@pytest.mark.parametrize(
    ("order", "epochs", "text"),
    [("shuffled_once", 1, "another order"), ("reshuffled", 1, "end of an epoch")],
)
def test_secret_orders_do_not_go_on_in_a_stock_loader(train, order, epochs, text):
    declared = {**DECLARED, "batch_order": order}
    loader = {"shuffle": True, "generator": secret_generator()} if order == "reshuffled" else {}
    engine, *private = train(declared, epochs=epochs, loader=loader)
    if order == "reshuffled":
        step(*private)
    other = train(declared, epochs=0, loader=loader)[0].accountant
    with pytest.raises(ValueError, match=text):
        other.load_state_dict(engine.accountant.state_dict())
    assert len(other) == 0


def test_relation_of_the_declaration(train):
    engine = PrivacyEngine(accountant="hidden_state")
    engine.accountant = HiddenStateAccountant("add_or_remove_one")
    with pytest.raises(hsa.UnsupportedRunError, match="REPLACE_SPECIAL"):
        train(DECLARED, engine=engine)
    engine = PrivacyEngine(accountant="hidden_state")
    engine.accountant = HiddenStateAccountant("add_or_remove_one")
    with pytest.raises(hsa.UnsupportedRunError, match="computes the rate and the divisor"):
        train({}, engine=engine, poisson_sampling=True)
    with pytest.raises(ValueError, match="neighboring_relation"):
        HiddenStateAccountant("replace")


def test_undeclared_is_poisson_composition_with_one_warning(train):
    engine, *_ = train(poisson_sampling=True)
    with pytest.warns(UserWarning, match=r"declare_run\(") as caught:
        value = engine.get_epsilon(DELTA)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engine.get_epsilon(DELTA) == value
    steps = len(engine.accountant)
    assert engine.accountant.history == [(2.0, 1 / 6, steps)]
    sampled = dp_accounting.PoissonSampledDpEvent(drawn(1 / 6), dp_accounting.GaussianDpEvent(2.0))
    stock = dp_accounting.pld.PLDAccountant().compose(sampled, steps)
    assert value == pytest.approx(stock.get_epsilon(DELTA), rel=1e-9)
    with pytest.raises(hsa.UnsupportedRunError, match="before the first step"):
        engine.accountant.declare_run(**DECLARED)


@pytest.mark.parametrize("declare", [1, 2])
def test_each_make_private_needs_its_declaration(train, declare):
    engine, *first = train(DECLARED)
    if declare == 1:
        with pytest.raises(hsa.UnsupportedRunError, match="one declare_run for every"):
            train(engine=engine)
        return
    train(DECLARED, engine=engine)
    assert engine.get_epsilon(DELTA) == epsilon(dp_accounting.ComposedDpEvent([event(), event()]))
    with pytest.raises(hsa.UnsupportedRunError, match="ended when make_private was called again"):
        step(*first)


def test_a_run_is_declared_between_make_private_and_its_first_step(train):
    with pytest.raises(hsa.UnsupportedRunError, match="got it before make_private"):
        HiddenStateAccountant().declare_run(**DECLARED)
    with pytest.raises(hsa.UnsupportedRunError, match="got it after a step"):
        train(DECLARED)[0].accountant.declare_run(**DECLARED)


@pytest.mark.filterwarnings("ignore:No run was declared")
@pytest.mark.parametrize("target", [0.3, 0.8])
def test_opacus_calibration_terminates(target):
    noise = get_noise_multiplier(
        target_epsilon=target, target_delta=DELTA, sample_rate=0.05, epochs=2,
        accountant="hidden_state", loss_geometry="ignored",
    )  # fmt: skip
    accountant = HiddenStateAccountant()
    accountant.history = [(noise, 0.05, 40)]
    assert accountant.history == [(noise, 0.05, 40)]
    assert target - 0.01 <= accountant.get_epsilon(DELTA) <= target
