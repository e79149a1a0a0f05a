"""What no hidden-state bound is about: accounted by composition, with one clear line.

Other optimizers, clip norms of layers, layers that are frozen later, half precision, penalties.
"""

import copy
import functools
import re

import pytest
import torch
from dp_accounting import NeighboringRelation
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_accountants import LossGeometry, UnsupportedRunError
from hidden_state_accountants.guarantee import Status
from hidden_state_adapters.opacus import (
    BallProjection,
    DiceSGD,
    HiddenStatePrivacyEngine,
)
from hidden_state_adapters.opacus.composed import ComposedOptimizer
from hidden_state_adapters.opacus.wrappers import HeadModule

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DELTA = 1e-5
PER_LAYER = {"clipping": "per_layer", "max_grad_norm": [3.0, 4.0]}


@pytest.fixture
def make(make_run):
    """A run with nothing that asks for a hidden state; Adam, unless told otherwise."""

    def make(base=torch.optim.Adam, options=None, **arguments):
        torch.manual_seed(0)
        model = arguments.pop("model", None) or nn.Linear(5, 3)
        if "optimizer" not in arguments:
            options = {"lr": 0.01, **(options or {})}
            arguments["optimizer"] = base(model.parameters(), **options)
        arguments = {"loss_geometry": None, "batch_order": "poisson", **arguments}
        return make_run(model=model, **arguments)

    return make


def as_composition(run):
    event = run.engine.privacy_event.as_composition(NeighboringRelation.ADD_OR_REMOVE_ONE)
    return hsa.LastIterateAccountant("ADD_OR_REMOVE_ONE").compose(event).get_epsilon(DELTA)


@pytest.mark.parametrize(
    ("base", "options", "name"),
    [
        (torch.optim.Adam, {}, "Adam"),
        (
            torch.optim.SGD,
            {"momentum": 0.9, "nesterov": True},
            r"SGD with momentum = 0\.9, nesterov = True",
        ),
    ],
)
def test_the_report_says_why_every_step_counts(make, base, options, name):
    run = make(base, options)
    run.epoch()
    report = run.engine.report(DELTA)
    line = f"no hidden-state bound for {name}: every step counts; epsilon is that of composition"
    assert re.search(line, report)
    assert "learning rate" not in report
    assert isinstance(run.optimizer, ComposedOptimizer)
    assert run.engine.get_epsilon(DELTA) == pytest.approx(as_composition(run), rel=1e-9)


def test_plain_sgd_is_recorded_as_it_is(make):
    run = make(torch.optim.SGD, {"weight_decay": 0.1})
    run.epoch()
    event = run.engine.privacy_event
    assert (event.learning_rate, event.weight_decay) == (0.01, 0.1)
    assert "criterion= without feature_norm=: every step counts" in run.engine.report(DELTA)


def test_momentum_that_a_scheduler_sets(make):
    """OneCycleLR sets it at the first step; nothing asked for a hidden state."""
    run = make(torch.optim.SGD)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, max_lr=0.5, total_steps=6)
    for batch in run.loader:
        run.step(batch)
        scheduler.step()
    assert "SGD with momentum = " in run.engine.report(DELTA)
    assert run.engine.get_epsilon(DELTA) == pytest.approx(as_composition(run), rel=1e-9)


# --- what asks for a hidden state ------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        ({"loss_geometry": "auto", "feature_norm": 1.0}, "criterion, feature_norm"),
        ({"loss_geometry": LossGeometry.convex(1.0)}, "loss_geometry"),
        ({"after": BallProjection(5.0)}, "after"),
        ({"schedule": 0.01}, "schedule"),
    ],
)
def test_hidden_state_bounds_stay_refused_by_name(make, arguments, asked):
    text = f"Expected torch.optim.SGD, got Adam.*Or leave out {asked}.*: any optimizer is accounted"
    with pytest.raises(UnsupportedRunError, match=text):
        make(**arguments)


# --- the guards that stay on ---------------------------------------------------------------------


def trained_before(model):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def test_moments_from_before_the_run(make):
    model = nn.Linear(5, 3)
    with pytest.raises(UnsupportedRunError, match="Adam that took no step, got one with a st"):
        make(model=model, optimizer=trained_before(model))


def test_moments_of_another_optimizer_are_not_loaded(make):
    run = make()
    state = trained_before(nn.Linear(5, 3)).state_dict()
    with pytest.raises(UnsupportedRunError, match="moments: from elsewhere they may hold"):
        run.optimizer.load_state_dict(state)


def test_moments_of_the_run_before_go_on(make):
    """The runs compose, and what the optimizer keeps was accounted by the first."""
    run = make()
    run.epoch()
    once = run.engine.get_epsilon(DELTA)
    model, optimizer, loader = run.engine.make_private(
        module=run.model, optimizer=run.optimizer, data_loader=run.loader, noise_multiplier=1.0,
        max_grad_norm=1.0,
    )  # fmt: skip
    run.model, run.optimizer, run.loader = model, optimizer, loader
    run.epoch()
    assert run.engine.get_epsilon(DELTA) > once


def test_a_step_hook_is_refused(make):
    run = make()
    run.optimizer.original_optimizer.register_step_pre_hook(lambda *args: None)
    with pytest.raises(UnsupportedRunError, match="without step hooks"):
        run.epoch()


class Halved(torch.optim.SGD):
    """An optimizer of the user's own."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-0.5 * group["lr"])


def test_an_optimizer_of_ones_own_is_taken_at_its_word(make):
    run = make(Halved)
    run.epoch()
    declared = [a.text for a in run.engine.assumptions if a.status is Status.DECLARED]
    assert "of the records Halved sees only the noisy gradients in .grad" in declared
    adam = make()
    adam.epoch()
    checked = [a.text for a in adam.engine.assumptions if a.status is Status.CHECKED]
    assert "momentum and moments made from noisy gradients only" in checked


# --- Opacus' clips -----------------------------------------------------------------------------

LAYERS = {"clipping": "per_layer", "max_grad_norm": [0.3, 0.02, 0.3, 0.004]}
WAYS = [
    {},
    LAYERS,
    {**LAYERS, "grad_sample_mode": "functorch"},
    {"grad_sample_mode": "ew"},
    {"grad_sample_mode": "ghost", "criterion": nn.CrossEntropyLoss()},
]


@pytest.mark.parametrize("way", WAYS)
def test_the_trajectory_is_that_of_opacus(way):
    """In pieces; 0.2 shortens about half of the gradients."""
    ends = []
    for engine, order in (
        (HiddenStatePrivacyEngine(), {"batch_order": "cyclic"}),
        (PrivacyEngine(), {"poisson_sampling": False}),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        data = TensorDataset(torch.randn(12, 5), torch.arange(12) % 3)
        private, optimizer, *criterion, loader = engine.make_private(
            module=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=4), noise_multiplier=0.0,
            **{"max_grad_norm": 0.2, **way, **order},
        )  # fmt: skip
        criterion = criterion[0] if criterion else nn.CrossEntropyLoss()
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=3, optimizer=optimizer
        ) as pieces:
            for features, labels in pieces:
                optimizer.zero_grad()
                criterion(private(features), labels).backward()
                optimizer.step()
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*ends, rtol=1e-4, atol=1e-5)
    assert torch.isfinite(ends[0]).all()


def test_the_noise_is_that_of_all_clip_norms_together(make):
    run = make(
        torch.optim.SGD, {"lr": 1.0}, batch_order="full", noise_multiplier=20.0,
        model=nn.Linear(5, 300), **PER_LAYER,
    )  # fmt: skip
    assert run.optimizer.max_grad_norm == 5.0
    assert not isinstance(run.model, HeadModule)  # as in Opacus
    before = [p.detach().clone() for p in run.plain_model.parameters()]
    run.epoch()
    assert run.engine.privacy_event.clip_norm == 5.0
    moved = [p.detach() - q for p, q in zip(run.plain_model.parameters(), before, strict=True)]
    std = float(torch.cat([m.flatten() for m in moved]).std()) * 60 / (20.0 * 5.0)
    assert std == pytest.approx(1, rel=0.1)  # 1800 numbers


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"max_grad_norm": 1.0}, ValueError, "a list of 2 clip norms"),
        ({"max_grad_norm": [1.0, 0.0]}, ValueError, "max_grad_norm"),
        (
            {"max_grad_norm": [1.0, 1.0], "grad_sample_mode": "ghost"},
            UnsupportedRunError,
            'with grad_sample_mode="ghost"',
        ),
        (
            {"max_grad_norm": [1.0, 1.0], "after": BallProjection(1.0)},
            UnsupportedRunError,
            '"per_layer" is accounted by composition',
        ),
    ],
)
def test_clip_norms_that_are_refused(make, arguments, error, text):
    with pytest.raises(error, match=text):
        make(torch.optim.SGD, clipping="per_layer", **arguments)


def test_the_sum_of_clip_norms_does_not_change(make):
    """A scheduler of Opacus scales what the noise is made from, and not the clips."""
    run = make(**PER_LAYER)
    run.optimizer.max_grad_norm *= 0.5
    with pytest.raises(UnsupportedRunError, match=r"uses max_grad_norm = 2\.5"):
        run.epoch()


def test_clip_norms_of_layers_do_not_change(make):
    """The noise is made from those of the start; the list of the call is no longer asked."""
    norms = [3.0, 4.0]
    run = make(clipping="per_layer", max_grad_norm=norms, batch_order="cyclic")
    norms[0] = 100.0
    assert run.optimizer.max_grad_norms == [3.0, 4.0]
    run.optimizer.max_grad_norms[0] = 100.0
    with pytest.raises(UnsupportedRunError, match=r"uses norms_of_layers = \(100\.0, 4\.0\)"):
        run.epoch()


# --- checkpoints ---------------------------------------------------------------------------------


def test_a_checkpoint_goes_on_with_the_moments(make, tmp_path):
    arguments = {"noise_multiplier": 0.0, "batch_order": "cyclic"}
    whole, first, second = (make(**arguments) for _ in range(3))
    for run, epochs in ((whole, 3), (first, 2)):
        for _ in range(epochs):
            run.epoch()
    first.engine.save_checkpoint(path=tmp_path / "adam.pt")
    second.engine.load_checkpoint(path=tmp_path / "adam.pt")
    second.epoch()
    assert second.steps == 18
    for a, b in zip(whole.plain_model.parameters(), second.plain_model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


# --- layers that are frozen in the middle of a run ------------------------------------------------


class Run:
    """20 batches of 6 in an epoch, with Adam (which divides by 0 in float16)."""

    def __init__(self, module, dtype=torch.float32, **arguments):
        base = torch.optim.SGD if dtype is torch.float16 else torch.optim.Adam
        generator = torch.Generator().manual_seed(0)
        records = torch.randn(120, 5, generator=generator).to(dtype)
        self.engine, self.module = HiddenStatePrivacyEngine(), module
        arguments = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, **arguments}
        self.model, self.optimizer, *criterion, self.loader = self.engine.make_private(
            module=module,
            optimizer=base([p for p in module.parameters() if p.requires_grad], lr=0.01),
            data_loader=DataLoader(TensorDataset(records, torch.arange(120) % 3), batch_size=6),
            **arguments,
        )
        self.criterion = criterion[0] if criterion else functional.cross_entropy

    def epoch(self, between=None):
        for index, (records, labels) in enumerate(self.loader):
            if between is not None and index == 10:
                between()
            self.optimizer.zero_grad()
            dtype = next(self.module.parameters()).dtype
            self.criterion(self.model(records.to(dtype)), labels).backward()
            self.optimizer.step()


def layers():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


def weights(module):
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.parametrize("arguments", [{}, {"grad_sample_mode": "functorch"}])
def test_a_layer_is_frozen_and_trained_again(arguments):
    """opacus 436: it stays as it is, moments and all, and every step counts as before."""
    whole = Run(layers(), **arguments)
    for _ in range(3):
        whole.epoch()
    run = Run(layers(), **arguments)
    run.epoch()
    kept = weights(run.module)
    run.module[0].requires_grad_(False)
    run.epoch()
    frozen = weights(run.module)
    assert all(torch.equal(a, b) for a, b in zip(kept[:2], frozen[:2], strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(kept[2:], frozen[2:], strict=True))
    run.module[0].requires_grad_(True)
    run.epoch()
    moved = weights(run.module)
    assert not any(torch.equal(a, b) for a, b in zip(frozen, moved, strict=True))
    assert run.engine.get_epsilon(DELTA) == whole.engine.get_epsilon(DELTA)


@pytest.mark.parametrize("arguments", [{}, {"grad_sample_mode": "functorch"}])
def test_what_a_closure_trains_again_gets_a_clip_and_noise(arguments):
    """A loop that toggles layers around its passes takes the steps of one that trains all."""
    runs = []
    for toggles in (False, True):
        generator = torch.Generator().manual_seed(1)
        run = Run(layers(), batch_order="cyclic", noise_generator=generator, **arguments)
        for records, labels in run.loader:

            def closure(run=run, records=records, labels=labels):
                run.module[0].requires_grad_(True)
                run.optimizer.zero_grad()
                run.criterion(run.model(records), labels).backward()

            run.module[0].requires_grad_(not toggles)
            run.optimizer.step(closure)
        runs.append(weights(run.module))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_a_bias_of_a_head_is_frozen_within_an_epoch():
    run = Run(nn.Linear(5, 3))
    kept = []

    def freeze():
        run.module.bias.requires_grad_(False)
        kept.append(run.module.bias.detach().clone())

    run.epoch(freeze)
    assert torch.equal(run.module.bias, kept[0])
    assert run.engine.privacy_event.num_steps == 20
    assert run.engine.get_epsilon(DELTA) > 0


def test_the_clip_is_then_that_of_what_is_trained():
    """Without noise the step is the sum of the clipped gradients of the layers that are left."""
    run = Run(layers(), noise_multiplier=0.0, max_grad_norm=0.1, batch_order="cyclic")
    run.module[0].requires_grad_(False)
    records, labels = next(iter(run.loader))
    plain, expected = layers(), 0
    for record, label in zip(records, labels, strict=True):
        loss = functional.cross_entropy(plain(record[None]), label[None])
        gradients = torch.autograd.grad(loss, [plain[2].weight, plain[2].bias])
        norm = torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients]))
        expected += gradients[0] * min(1.0, 0.1 / float(norm + 1e-6)) / 6
    run.optimizer.zero_grad()
    functional.cross_entropy(run.model(records), labels).backward()
    run.optimizer.step()
    torch.testing.assert_close(run.module[2].weight.grad, expected)


def test_what_was_not_trained_at_the_start_stays_frozen():
    module = layers()
    module[0].requires_grad_(False)
    run = Run(module)
    module[0].requires_grad_(True)
    with pytest.raises(UnsupportedRunError, match=r"trains \['0.weight'.* can only shrink"):
        run.epoch()


@pytest.mark.parametrize(
    "arguments",
    [{"clipping": "per_layer", "max_grad_norm": [1.0] * 4}, {"grad_sample_mode": "ghost"}],
)
def test_where_opacus_looks_at_all_parameters_none_is_frozen_later(arguments):
    run = Run(layers(), batch_order="cyclic", **arguments)
    run.epoch()
    run.module[0].requires_grad_(False)
    with pytest.raises(UnsupportedRunError, match="Expected the trainable parameters of the start"):
        run.epoch()


# --- half precision -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "dtype"), [(layers, torch.bfloat16), (lambda: nn.Linear(5, 3), torch.float16)]
)
def test_parameters_in_half_precision(module, dtype):
    run, single = Run(module().to(dtype), dtype), Run(module())
    before = weights(run.module)
    run.epoch()
    single.epoch()
    assert not any(torch.equal(a, b) for a, b in zip(before, weights(run.module), strict=True))
    assert run.engine.get_epsilon(DELTA) == single.engine.get_epsilon(DELTA)
    assert any("noise is drawn, in float32" in a.text for a in run.engine.assumptions)


def test_a_record_counts_for_its_clip_norm_in_half_precision():
    """In bfloat16 the sum of 1028 gradients is 1024, that of 1029 is 1032."""
    sums = []
    for last in (0.0, 1.0):
        model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
        records = torch.ones(1029, 1, dtype=torch.bfloat16)
        records[-1] = last
        module, optimizer, loader = HiddenStatePrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(TensorDataset(records), batch_size=1029), noise_multiplier=0.5,
            max_grad_norm=1.0, batch_order="full", loss_reduction="sum",
        )  # fmt: skip
        for (inputs,) in loader:
            optimizer.zero_grad()
            module(inputs).sum().backward()
            optimizer.step()
        sums.append(float(model.weight.summed_grad))
    assert sums[1] - sums[0] == pytest.approx(1.0, rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"grad_sample_mode": "ghost"}, "parameters in half precision"),
        ({"clipping": "per_layer", "max_grad_norm": [1.0] * 4}, "parameters in half precision"),
        ({"mechanism": DiceSGD(gradient_bound=9.0)}, "float32 or float64"),
    ],
)
def test_sums_in_half_precision_are_refused(arguments, text):
    with pytest.raises(UnsupportedRunError, match=text):
        Run(layers().to(torch.bfloat16), torch.bfloat16, **arguments)


def test_a_run_does_not_change_its_precision():
    run = Run(layers())
    with pytest.raises(UnsupportedRunError, match="changed outside"):
        run.epoch(run.module.bfloat16)


# --- what reaches the parameters beside the records, and the inputs through the model -------------

BESIDE = r"something beside the outputs of .*\(a penalty in the loss.* weight_decay"
KNOWN = {"criterion": nn.CrossEntropyLoss(), "feature_norm": 10.0, "max_grad_norm": "auto"}


def convolution():
    before = nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 3), nn.GroupNorm(2, 4)
    return nn.Sequential(*before, nn.Flatten(), nn.Linear(12, 3))


def private(module, engine=None, rate=0.1, **arguments):
    records = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    arguments = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, **arguments}
    model, optimizer, *_, loader = (engine or HiddenStatePrivacyEngine()).make_private(
        module=module,
        optimizer=torch.optim.SGD(module.parameters(), lr=rate),
        data_loader=DataLoader(TensorDataset(records, torch.arange(12) % 3), batch_size=6),
        batch_order="cyclic",
        **arguments,
    )
    return model, optimizer, loader


def trained(module, penalty=0.0, between=None, **arguments):
    torch.manual_seed(0)
    own = torch.Generator().manual_seed(1)
    model, optimizer, loader = private(module, noise_generator=own, **arguments)
    for records, labels in loader:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(records), labels)
        (loss + penalty * sum(p.square().sum() for p in module.parameters())).backward()
        if between is not None:
            between()
        optimizer.step()
    return [param.detach().clone() for param in module.parameters()]


HEADS = {"head": lambda: nn.Linear(5, 3), "layers": layers, "convolution": convolution}


@pytest.mark.parametrize("penalty", [1e-3, 100.0])
def test_a_penalty_is_refused_of_a_head_and_has_no_effect_elsewhere(penalty):
    with pytest.raises(UnsupportedRunError, match=BESIDE):
        trained(nn.Linear(5, 3), penalty, **KNOWN)
    module = layers()
    again = copy.deepcopy(module)
    assert all(map(torch.equal, trained(module), trained(again, penalty)))


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("arithmetic", ["float32", "bfloat16"])
def test_ordinary_loops(kind, arithmetic):
    """Gradients that a stock script clips once more, and autocast."""
    module = HEADS[kind]()
    clip = functools.partial(nn.utils.clip_grad_norm_, list(module.parameters()), 1e-3)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=arithmetic == "bfloat16"):
        trained(module, between=clip)


@pytest.mark.parametrize("kind", HEADS)
def test_an_encoder_outside_gets_its_gradient(kind):
    """That of the loss, without noise, as in Opacus; the head moves as without the encoder."""
    torch.manual_seed(0)
    module, encoder = HEADS[kind](), nn.Linear(5, 5)
    model, optimizer, loader = private(module, noise_multiplier=0.0)
    for records, labels in loader:
        optimizer.zero_grad()
        encoder.zero_grad()
        records.requires_grad_()
        plain = HEADS[kind]()
        plain.load_state_dict(module.state_dict())
        expected = torch.autograd.grad(
            functional.cross_entropy(plain(encoder(records)), labels), [records, encoder.weight]
        )
        functional.cross_entropy(model(encoder(records)), labels).backward()
        torch.testing.assert_close([records.grad, encoder.weight.grad], list(expected))
        optimizer.step()
