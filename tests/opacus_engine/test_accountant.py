import math
import warnings

import dp_accounting
import pytest
import torch
from dp_accounting import NeighboringRelation
from opacus import PrivacyEngine
from opacus.accountants import create_accountant
from opacus.accountants.utils import get_noise_multiplier
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import HiddenStateAccountant

pytestmark = pytest.mark.filterwarnings("ignore:Secure RNG", "ignore:Full backward hook")

DELTA = 1e-5
SOFTMAX = hsa.LossGeometry.softmax_cross_entropy(1.0, bias=True)
DECLARED = {"batch_order": "cyclic", "dataset_size": 60, "batch_size": 10, "loss_geometry": SOFTMAX}


@pytest.fixture
def train(make_loader):
    def train(declared=None, optimizer=None, epochs=2, engine=None, loader=None, **kwargs):
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        engine = engine or PrivacyEngine(accountant="hidden_state")
        if declared is not None:
            engine.accountant.declare_run(**declared)
        make = optimizer or (lambda p: torch.optim.SGD(p, lr=0.5, weight_decay=0.1))
        arguments = {
            "noise_multiplier": 2.0, "max_grad_norm": 2.1, "poisson_sampling": False, **kwargs,
        }  # fmt: skip
        model, private, batches = engine.make_private(
            module=model,
            optimizer=make(model.parameters()),
            data_loader=make_loader(**(loader or {})),
            **arguments,
        )
        criterion = nn.CrossEntropyLoss()
        for _ in range(epochs):
            for features, labels in batches:
                private.zero_grad()
                criterion(model(features), labels).backward()
                private.step()
        return engine, model, private, batches

    return train


def event(**changes):
    arguments = {
        "noise_multiplier": 2.0, "learning_rate": 0.5, "clip_norm": 2.1, "batch_size": 10,
        "dataset_size": 60, "num_steps": 12, "batch_order": "cyclic", "loss": SOFTMAX,
        "weight_decay": 0.1, **changes,
    }  # fmt: skip
    return hsa.LastIterateDpEvent(**arguments)


def epsilon(event, relation=NeighboringRelation.REPLACE_SPECIAL):
    return pytest.approx(
        hsa.LastIterateAccountant(relation).compose(event).get_epsilon(DELTA),
        rel=1e-12,
    )


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


def test_declared_projection_is_checked(train):
    engine, *_ = train({**DECLARED, "projection_radius": 50.0})
    assert engine.get_epsilon(DELTA) == epsilon(event(domain_diameter=100.0))
    with pytest.raises(hsa.UnsupportedRunError, match=r"step \d+ starts at norm"):
        train({**DECLARED, "projection_radius": 1.5}, epochs=5)


def test_declared_poisson_is_composition(train):
    declared = {**DECLARED, "batch_order": "poisson"}
    engine, *_ = train(declared, poisson_sampling=True, noise_multiplier=5.0)
    expected = event(batch_order="poisson", noise_multiplier=5.0)
    assert engine.get_epsilon(DELTA) == epsilon(expected)


def test_declared_full(train):
    declared = {**DECLARED, "batch_order": "full", "batch_size": 60}
    engine, *_ = train(declared, loader={"batch_size": 60})
    assert engine.get_epsilon(DELTA) == epsilon(
        event(batch_order="full", batch_size=60, num_steps=2)
    )


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
    engine, *_ = train(DECLARED, optimizer=optimizer, **arguments)
    assert engine.get_epsilon(DELTA) == epsilon(event(loss=None, weight_decay=0.0))
    assert engine.accountant.guarantee.mu == pytest.approx(math.sqrt(2) / 2)
    lines = [r.message for r in caplog.records if r.name == "hidden_state_accountants"]
    assert len(lines) == 1
    assert text in lines[0]
    assert "composition" in lines[0]


def test_momentum_mid_run_raises(train):
    _, model, private, batches = train(DECLARED)
    private.param_groups[0]["momentum"] = 0.9
    with pytest.raises(hsa.UnsupportedRunError, match="step 13 changed the optimizer"):
        step(model, private, batches)


def step(model, private, batches, factor=1.0):
    features, labels = next(iter(batches))
    private.zero_grad()
    (factor * nn.CrossEntropyLoss()(model(features), labels)).backward()
    private.step()


def test_scaled_loss_raises(train):
    _, model, private, batches = train(DECLARED)
    with pytest.raises(hsa.UnsupportedRunError, match="step 13 has a per-example gradient"):
        step(model, private, batches, factor=5.0)


def test_accumulation_raises(train):
    _, model, private, batches = train(DECLARED)
    private.zero_grad()
    for features, labels in batches:
        nn.CrossEntropyLoss()(model(features), labels).backward()
    with pytest.raises(hsa.UnsupportedRunError, match="gradients of 6 batches"):
        private.step()


def test_memory_manager_is_left_to_the_engine(train):
    _, model, private, batches = train(DECLARED)
    with BatchMemoryManager(
        data_loader=batches, max_physical_batch_size=5, optimizer=private
    ) as loader:
        pieces = iter(loader)
        step(model, private, [next(pieces)])
        with pytest.raises(hsa.UnsupportedRunError, match="several pieces"):
            step(model, private, [next(pieces)])


@pytest.mark.parametrize(
    ("changes", "arguments", "text"),
    [
        ({"batch_size": 12}, {}, "divides by 10, expected batch_size = 12"),
        ({}, {"max_grad_norm": 2.0}, "Raise max_grad_norm"),
        ({"dataset_size": 99, "batch_order": "poisson"}, {"poisson_sampling": True}, "sample rate"),
    ],
)  # fmt: skip
def test_a_run_that_differs_from_the_declaration_raises(train, changes, arguments, text):
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        train({**DECLARED, **changes}, **arguments)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"batch_order": "reshuffled"}, hsa.UnsupportedRunError, "cyclic, full, poisson"),
        ({"batch_size": 7}, hsa.UnsupportedRunError, "divides dataset_size"),
        ({"batch_order": "full"}, ValueError, "FULL"),
        ({"loss_geometry": "auto"}, TypeError, "LossGeometry"),
        ({"projection_radius": -1.0}, ValueError, "domain_diameter"),
    ],
)
def test_declarations_that_are_refused(changes, error, text):
    with pytest.raises(error, match=text):
        HiddenStateAccountant().declare_run(**{**DECLARED, **changes})


def test_relation_of_the_declaration():
    accountant = HiddenStateAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
    with pytest.raises(hsa.UnsupportedRunError, match="REPLACE_SPECIAL"):
        accountant.declare_run(**DECLARED)
    with pytest.raises(TypeError, match="neighboring_relation"):
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
    sampled = dp_accounting.PoissonSampledDpEvent(1 / 6, dp_accounting.GaussianDpEvent(2.0))
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
    with pytest.raises(hsa.UnsupportedRunError, match="ended when the next one was declared"):
        step(*first)


def test_redeclaring_before_the_first_step_replaces():
    accountant = HiddenStateAccountant()
    accountant.declare_run(**DECLARED)
    accountant.declare_run(**{**DECLARED, "batch_size": 20})
    (recorder,) = accountant.recorders
    assert recorder.state_dict()["declared"]["batch_size"] == 20
    with pytest.raises(hsa.UnsupportedRunError, match="step hook"):
        accountant.step(noise_multiplier=1.0, sample_rate=0.1)


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


def test_make_private_with_epsilon(train, make_loader):
    engine = PrivacyEngine(accountant="hidden_state")
    model = nn.Linear(5, 3)
    _, private, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.5),
        data_loader=make_loader(),
        target_epsilon=0.5,
        target_delta=DELTA,
        epochs=3,
        max_grad_norm=1.0,
    )
    assert private.noise_multiplier > 0.5
    assert len(loader) == 6


@pytest.mark.filterwarnings("error:No run was declared")
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


@pytest.mark.filterwarnings("error:No run was declared")
def test_step_keeps_three_tuples():
    accountant = HiddenStateAccountant()
    for noise in (1.0, 1.0, 2.0):
        accountant.step(noise_multiplier=noise, sample_rate=0.1)
    assert accountant.history == [(1.0, 0.1, 2), (2.0, 0.1, 1)]
    assert len(accountant) == 3
    state = accountant.state_dict()
    assert state["history"] == accountant.history
    assert state["history"] is not accountant.history
    other = HiddenStateAccountant()
    other.load_state_dict(state)
    assert other.history == accountant.history
    other.step(noise_multiplier=2.0, sample_rate=0.1)
    assert len(accountant) == 3
    destination = {"mine": 1}
    assert accountant.state_dict(destination) is destination
    assert destination["mine"] == 1


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


def test_declared_state_round_trip(train, tmp_path):
    engine, model, private, _ = train(DECLARED)
    path = tmp_path / "checkpoint.pt"
    engine.save_checkpoint(path=path, module=model, optimizer=private)
    state = torch.load(path, weights_only=True)["privacy_accountant_state_dict"]
    plain = HiddenStateAccountant()
    plain.load_state_dict(state)
    declared = HiddenStateAccountant()
    declared.declare_run(**DECLARED)
    declared.load_state_dict(state)
    for accountant in (plain, declared):
        assert accountant.get_epsilon(DELTA) == engine.get_epsilon(DELTA)
        assert len(accountant) == 12
    with pytest.raises(ValueError, match="without steps, got one with 12"):
        plain.load_state_dict(state)
    with pytest.raises(ValueError, match="history is overwritten"):
        plain.history = []
    other = HiddenStateAccountant()
    other.declare_run(**{**DECLARED, "batch_size": 20})
    with pytest.raises(ValueError, match="batch_size = 20, got 10"):
        other.load_state_dict(state)


def test_stock_run_resumes_at_the_end_of_an_epoch_only(train):
    engine, model, private, batches = train(DECLARED)
    step(model, private, batches)
    other = HiddenStateAccountant()
    other.declare_run(**DECLARED)
    with pytest.raises(ValueError, match="end of an epoch"):
        other.load_state_dict(engine.accountant.state_dict())
