"""accountant="hidden_state" in Opacus' own engine: what is declared and noticed, and its state."""

import math

import dp_accounting
import pytest
import torch
from dp_accounting import NeighboringRelation
from opacus import PrivacyEngine
from opacus.accountants import create_accountant
from opacus.accountants.utils import get_noise_multiplier
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus_stock import DECLARED, DELTA, KINDS, drawn, epsilon, event, resume, step
from torch import nn

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import HiddenStateAccountant

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

COMPOSED = {**DECLARED, "loss_geometry": None}


def test_registered():
    assert isinstance(create_accountant("hidden_state"), HiddenStateAccountant)
    assert HiddenStateAccountant.mechanism() == "hidden_state"


# --- declared runs --------------------------------------------------------------------------------


def test_declared_run(train):
    engine, *_ = train(DECLARED)
    accountant = engine.accountant
    assert engine.get_epsilon(DELTA) == epsilon(event())
    assert accountant.get_epsilon(delta=DELTA, anything="else") == epsilon(event())
    assert accountant.history == [(0.0, 1.0, 12)]  # no reader takes it for DP-SGD
    assert len(accountant) == 12
    assert accountant.guarantee.theorem.startswith("Theorem A")


@pytest.mark.parametrize(
    ("kind", "text"),
    [("momentum", "momentum"), ("adam", "Adam"), ("per layer", "DPPerLayerOptimizer")],
)
def test_other_optimizers_are_composed(train, caplog, kind, text):
    optimizer, arguments = KINDS[kind]
    with caplog.at_level("INFO", "hidden_state_accountants"):
        engine, *_ = train(DECLARED, optimizer=optimizer, **arguments)
    assert engine.get_epsilon(DELTA) == epsilon(event(loss=None, weight_decay=0.0))
    (line,) = [r.message for r in caplog.records if r.name == "hidden_state_accountants"]
    assert text in line
    assert "No last-iterate theorem" in line


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
    with pytest.raises(hsa.UnsupportedRunError, match=r"step 1: .* got AdaClipDPOptimizer"):
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


@pytest.mark.parametrize("kind", KINDS)
def test_accumulation_raises_for_every_optimizer(train, kind):
    optimizer, arguments = KINDS[kind]
    engine, model, private, batches = train(DECLARED, optimizer=optimizer, epochs=0, **arguments)
    criterion = nn.CrossEntropyLoss()
    for _, (features, labels) in zip(range(2), batches, strict=False):
        criterion(model(features), labels).backward()
    with pytest.raises(hsa.UnsupportedRunError, match="step 1: got the gradients of 2 batches"):
        private.step()
    assert len(engine.accountant) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_batches_in_pieces(train, kind):
    optimizer, arguments = KINDS[kind]
    engine, model, private, batches = train(DECLARED, optimizer=optimizer, epochs=0, **arguments)
    with BatchMemoryManager(
        data_loader=batches, max_physical_batch_size=4, optimizer=private
    ) as loader:
        for batch in loader:
            step(model, private, [batch])
    whole, *_ = train(DECLARED, optimizer=optimizer, epochs=1, **arguments)
    assert len(engine.accountant) == 6
    assert engine.get_epsilon(DELTA) == whole.get_epsilon(DELTA)


def test_what_the_accountant_cannot_see_is_declared(train):
    engine, *_ = train(DECLARED)
    plain = HiddenStateAccountant()
    plain.load_state_dict(engine.accountant.state_dict())
    for accountant in (engine.accountant, plain):
        lines = [str(assumption) for assumption in accountant.guarantee.assumptions]
        assert len(set(lines)) == len(lines)
        (line,) = [line for line in lines if "clipped per-example gradients are right" in line]
        for text in ("declared: ", "every batch", "of one record", "initial"):
            assert text in line


@pytest.mark.parametrize("declared", [COMPOSED, None])
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


@pytest.mark.parametrize(
    ("changes", "arguments", "error", "text"),
    [
        ({"batch_order": "sorted"}, {}, ValueError, "batch_order to be one of full, cyclic"),
        ({"loss_geometry": "convex"}, {}, TypeError, "LossGeometry"),
        ({"loss_geometry": "auto"}, {}, TypeError, '"auto" with a criterion'),
        ({}, {"max_grad_norm": 2.0}, hsa.UnsupportedRunError, "Raise max_grad_norm"),
    ],
)
def test_declarations_that_are_refused(train, changes, arguments, error, text):
    with pytest.raises(error, match=text):
        train({**DECLARED, **changes}, **arguments)


def test_a_fixed_order_that_is_kept_secret(train):
    engine, *_ = train({**DECLARED, "batch_order": "shuffled_once"})
    assert engine.get_epsilon(DELTA) == epsilon(event(batch_order="shuffled_once"))
    assert "nobody ever learns it or its seed" in engine.accountant.guarantee.explain()


def test_relation_of_the_declaration(train):
    engine = PrivacyEngine(accountant="hidden_state")
    engine.accountant = HiddenStateAccountant("add_or_remove_one")
    with pytest.raises(hsa.UnsupportedRunError, match="computes the rate and the divisor"):
        train({}, engine=engine, poisson_sampling=True)
    with pytest.raises(ValueError, match="neighboring_relation"):
        HiddenStateAccountant("replace")


@pytest.mark.parametrize("declare", [1, 2])
def test_each_make_private_needs_its_declaration(train, declare):
    engine, *first = train(DECLARED)
    if declare == 1:
        with pytest.raises(hsa.UnsupportedRunError, match="after every make_private"):
            train(engine=engine)
        return
    train(DECLARED, engine=engine)
    assert engine.get_epsilon(DELTA) == epsilon(dp_accounting.ComposedDpEvent([event(), event()]))
    with pytest.raises(hsa.UnsupportedRunError, match="ended when make_private was called again"):
        step(*first)


def test_a_run_is_declared_between_make_private_and_its_first_step(train):
    for accountant in (HiddenStateAccountant(), train(DECLARED)[0].accountant):
        with pytest.raises(hsa.UnsupportedRunError, match="Expected declare_run after make_priv"):
            accountant.declare_run(**DECLARED)


# --- undeclared steps, and a history that is written ----------------------------------------------


def test_undeclared_is_poisson_composition(train):
    engine, *_ = train(poisson_sampling=True)
    with pytest.warns(UserWarning, match="for Poisson loaders only"):
        value = engine.get_epsilon(DELTA)
    steps = len(engine.accountant)
    assert engine.accountant.history == [(2.0, 1 / 6, steps)]
    sampled = dp_accounting.PoissonSampledDpEvent(drawn(1 / 6), dp_accounting.GaussianDpEvent(2.0))
    stock = dp_accounting.pld.PLDAccountant().compose(sampled, steps)
    assert value == pytest.approx(stock.get_epsilon(DELTA), rel=1e-9)
    with pytest.raises(hsa.UnsupportedRunError, match="declared runs or undeclared steps"):
        engine.accountant.declare_run(**DECLARED)


def test_undeclared_steps_and_runs_do_not_mix(train, make_run):
    undeclared = HiddenStateAccountant()
    undeclared.step(noise_multiplier=5.0, sample_rate=0.1)
    loaded = HiddenStateAccountant()
    loaded.load_state_dict(undeclared.state_dict())
    run = make_run()
    for accountant in (undeclared, loaded):
        with pytest.raises(hsa.UnsupportedRunError, match="got both"):
            accountant.add_run(run.optimizer.run)
        assert len(accountant) == 1
    for accountant in (run.engine.accountant, train(DECLARED)[0].accountant):
        for write in (
            lambda own: setattr(own, "history", [(5.0, 0.1, 6)]),
            lambda own: own.step(noise_multiplier=5.0, sample_rate=0.1),
        ):
            with pytest.raises(hsa.UnsupportedRunError, match="got both"):
                write(accountant)
    declared = train(DECLARED, epochs=0)[0].accountant
    with pytest.raises(hsa.UnsupportedRunError, match="got both"):
        declared.load_state_dict(undeclared.state_dict())
    declared.load_state_dict(HiddenStateAccountant().state_dict())


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


def test_written_history():
    accountant = HiddenStateAccountant()
    assert accountant.get_epsilon(DELTA) == 0
    values = []
    for noise in (1.0, 2.0, 4.0, 50.0):
        accountant.history = [(noise, 0.05, 100)]
        values.append(accountant.get_epsilon(delta=DELTA))
    assert values == sorted(values, reverse=True)
    assert all(0 < value < 100 for value in values)
    accountant.history = [(0.0, 0.05, 100)]
    assert accountant.get_epsilon(DELTA) == math.inf
    accountant.history = [(1.0, 1.0, 4)]
    assert accountant.get_epsilon(DELTA) == pytest.approx(
        epsilon(dp_accounting.GaussianDpEvent(0.5), NeighboringRelation.ADD_OR_REMOVE_ONE)
    )
    accountant.history = []
    assert accountant.get_epsilon(DELTA) == 0


def test_step_keeps_three_tuples():
    accountant = HiddenStateAccountant()
    for noise in (1.0, 1.0, 2.0):
        accountant.step(noise_multiplier=noise, sample_rate=0.1)
    assert accountant.history == [(1.0, 0.1, 2), (2.0, 0.1, 1)]
    assert len(accountant) == 3
    destination = {"mine": 1}
    state = accountant.state_dict(destination)
    assert state is destination
    assert state["history"] == accountant.history
    other = HiddenStateAccountant()
    other.load_state_dict(state)
    other.step(noise_multiplier=2.0, sample_rate=0.1)
    assert other.history == [(1.0, 0.1, 2), (2.0, 0.1, 2)]
    assert len(accountant) == 3


# --- states ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("declared", [DECLARED, COMPOSED])
@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_a_run_that_goes_on_is_a_second_one(train, declared, kind):
    """Of which the loader starts again, in whatever order; the checkpoint counts as a release."""
    optimizer, _ = KINDS[kind]
    first, *run = train(declared, optimizer=optimizer)
    step(*run)  # within an epoch
    spent = first.get_epsilon(DELTA)
    second, *again = resume(train, first, declared, kind)
    assert len(second.accountant) == len(first.accountant) == 13
    assert second.get_epsilon(DELTA) == spent
    step(*again)
    events = [each.event() for each in second.accountant.recorders]
    assert [each.num_steps for each in events] == [13, 1]
    assert second.get_epsilon(DELTA) == epsilon(dp_accounting.ComposedDpEvent(events))
    assert second.get_epsilon(DELTA) > spent


@pytest.mark.parametrize(
    "state",
    [
        None,
        {},
        {"mechanism": "hidden_state"},
        {"history": []},
        {"history": [], "mechanism": "prv"},
        {"history": [], "mechanism": "hidden_state", "neighboring_relation": "REPLACE_ONE"},
    ],
)
def test_states_that_are_refused(state):
    with pytest.raises(ValueError):  # noqa: PT011
        HiddenStateAccountant().load_state_dict(state)


def test_a_state_keeps_what_was_said_and_replaces_nothing(train, tmp_path):
    engine, model, private, _ = train(DECLARED)
    engine.accountant.assume("nobody looked")
    path = tmp_path / "checkpoint.pt"
    engine.save_checkpoint(path=path, module=model, optimizer=private)
    state = torch.load(path, weights_only=True)["privacy_accountant_state_dict"]
    loaded = HiddenStateAccountant()
    loaded.load_state_dict(state)
    assert loaded.get_epsilon(DELTA) == engine.get_epsilon(DELTA)
    (run,) = loaded.state_dict()["runs"]
    assert "nobody looked" in run["assumptions"]
    with pytest.raises(ValueError, match="without steps, got one with 12"):
        loaded.load_state_dict(state)
    engine.accountant.refuse("a look at private data")
    loaded = HiddenStateAccountant()
    loaded.load_state_dict(engine.accountant.state_dict())
    with pytest.raises(hsa.UnsupportedRunError, match="a look at private data"):
        loaded.get_epsilon(DELTA)
