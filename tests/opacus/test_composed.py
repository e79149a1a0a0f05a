"""What no hidden-state bound is about: accounted by composition, with one clear line.

Other optimizers, clip norms of layers, layers that are frozen later, half precision, penalties.
"""

import functools
import itertools

import numpy as np
import pytest
import torch
from dp_accounting import NeighboringRelation
from opacus import PrivacyEngine
from opacus_runs import flat, in_pieces, layers, weights
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_accountants import LossGeometry, Regulariser, UnsupportedRunError
from hidden_state_accountants.guarantee import Status
from hidden_state_adapters.opacus import (
    DiceSGD,
    DiceSGDOptimizer,
)
from hidden_state_adapters.opacus.wrappers import HeadModule

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DELTA = 1e-5
PER_LAYER = {"clipping": "per_layer", "max_grad_norm": [3.0, 4.0]}
FUNCTORCH, GHOST = {"grad_sample_mode": "functorch"}, {"grad_sample_mode": "ghost"}


@pytest.fixture
def make(make_run):
    """A run with nothing that asks for a hidden state; Adam, unless told otherwise."""

    def make(base=torch.optim.Adam, options=None, model=None, **arguments):
        torch.manual_seed(0)
        model = nn.Linear(5, 3) if model is None else model
        params = [p for p in model.parameters() if p.requires_grad]
        arguments.setdefault("optimizer", base(params, **{"lr": 0.01, **(options or {})}))
        arguments = {"loss_geometry": None, "batch_order": "poisson", **arguments}
        return make_run(model=model, **arguments)

    return make


def as_composition(run):
    event = run.engine.privacy_event.as_composition(NeighboringRelation.ADD_OR_REMOVE_ONE)
    return hsa.LastIterateAccountant("ADD_OR_REMOVE_ONE").compose(event).get_epsilon(DELTA)


def assumed(run, status):
    return [a.text for a in run.engine.assumptions if a.status is status]


# --- any optimizer --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("base", "options", "name"),
    [
        (torch.optim.Adam, {}, "no hidden-state bound for Adam"),
        (
            torch.optim.SGD,
            {"momentum": 0.9, "nesterov": True},
            "no hidden-state bound for SGD with momentum = 0.9, nesterov = True",
        ),
        (torch.optim.SGD, {"weight_decay": 0.1}, "criterion= without feature_norm="),
    ],
)
def test_the_report_says_why_every_step_counts(make, base, options, name):
    run = make(base, options)
    run.epoch()
    report = run.engine.report(DELTA)
    assert f"{name}: every step counts" in report
    assert run.engine.get_epsilon(DELTA) == pytest.approx(as_composition(run), rel=1e-9)
    if "weight_decay" in options:
        event = run.engine.privacy_event
        assert (event.learning_rate, event.weight_decay) == (0.01, 0.1)


def test_momentum_that_a_scheduler_sets(make):
    """OneCycleLR sets it at the first step; nothing asked for a hidden state."""
    run = make(torch.optim.SGD)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, max_lr=0.5, total_steps=6)
    for batch in run.loader:
        run.step(batch)
        scheduler.step()
    assert "SGD with momentum = " in run.engine.report(DELTA)
    assert run.engine.get_epsilon(DELTA) == pytest.approx(as_composition(run), rel=1e-9)


class Halved(torch.optim.SGD):
    """An optimizer of the user's own."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-0.5 * group["lr"])


def test_an_optimizer_of_ones_own_is_taken_at_its_word(make):
    own, adam = make(Halved), make()
    own.epoch()
    adam.epoch()
    text = "of the records Halved sees only the noisy gradients in .grad"
    assert text in assumed(own, Status.DECLARED)
    assert "momentum and moments made from noisy gradients only" in assumed(adam, Status.CHECKED)


# --- moments --------------------------------------------------------------------------------------


def trained_before(model, base=torch.optim.Adam, **options):
    optimizer = base(model.parameters(), lr=0.01, **options)
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


DICE = {"optimizer_class": DiceSGDOptimizer}
SGD = functools.partial(trained_before, base=torch.optim.SGD, momentum=0.9)


@pytest.mark.parametrize(("trained", "arguments"), [(trained_before, {}), (SGD, DICE)])
def test_moments_from_elsewhere(make, trained, arguments):
    """They may hold gradients without noise: the first step would show them."""
    model = nn.Linear(5, 3)
    with pytest.raises(UnsupportedRunError, match="that took no step, got one with a st"):
        make(model=model, optimizer=trained(model), **arguments)
    run = make(torch.optim.SGD if arguments else torch.optim.Adam, **arguments)
    with pytest.raises(UnsupportedRunError, match="moments: from elsewhere they may hold"):
        run.optimizer.load_state_dict(trained(nn.Linear(5, 3)).state_dict())


def test_moments_of_the_run_before_go_on(make):
    """The runs compose, and what the optimizer keeps was accounted by the first."""
    run = make()
    run.epoch()
    once = run.engine.get_epsilon(DELTA)
    run.model, run.optimizer, run.loader = run.engine.make_private(
        module=run.model, optimizer=run.optimizer, data_loader=run.loader, noise_multiplier=1.0,
        max_grad_norm=1.0,
    )  # fmt: skip
    run.epoch()
    assert run.engine.get_epsilon(DELTA) > once


# --- Opacus' clips --------------------------------------------------------------------------------

LAYERS = {"clipping": "per_layer", "max_grad_norm": [0.45, 0.6, 0.5, 0.8]}
WAYS = [
    {},
    LAYERS,
    {**LAYERS, **FUNCTORCH},
    {"grad_sample_mode": "ew"},
    {**GHOST, "criterion": nn.CrossEntropyLoss()},
]


@pytest.mark.parametrize("way", WAYS)
def test_the_trajectory_is_that_of_opacus(make, dataset, way):
    """In pieces; the clips shorten about half of the gradients."""
    arguments = {"noise_multiplier": 0.0, "max_grad_norm": 1.2, **way}
    ours = make(options={"lr": 0.1}, model=layers(), batch_order="cyclic", **arguments)
    model = layers()
    private, optimizer, *criterion, loader = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.Adam(model.parameters(), lr=0.1),
        data_loader=DataLoader(dataset, batch_size=10), poisson_sampling=False, **arguments,
    )  # fmt: skip
    criterion = criterion[0] if criterion else nn.CrossEntropyLoss()
    theirs = type(ours)(None, private, optimizer, loader, model, criterion)
    for run in (ours, theirs):
        with in_pieces(run, 4) as pieces:
            run.epoch(pieces)
    np.testing.assert_allclose(weights(ours), weights(theirs), rtol=1e-4, atol=1e-5)


def test_the_noise_is_that_of_all_clip_norms_together(make):
    run = make(
        torch.optim.SGD, {"lr": 1.0}, batch_order="full", noise_multiplier=20.0,
        model=nn.Linear(5, 300), **PER_LAYER,
    )  # fmt: skip
    assert run.optimizer.max_grad_norm == 5.0
    assert not isinstance(run.model, HeadModule)  # as in Opacus
    before = weights(run)
    run.epoch()
    assert run.engine.privacy_event.clip_norm == 5.0
    std = (weights(run) - before).std() * 60 / (20.0 * 5.0)
    assert std == pytest.approx(1, rel=0.1)  # 1800 numbers


def test_clip_norms_of_layers_do_not_change(make):
    """The noise is made from those of the start; the list of the call is no longer asked."""
    norms = [3.0, 4.0]
    one, all_together = (make(clipping="per_layer", max_grad_norm=norms) for _ in range(2))
    norms[0] = 100.0
    assert one.optimizer.max_grad_norms == [3.0, 4.0]
    one.optimizer.max_grad_norms[0] = 100.0
    with pytest.raises(UnsupportedRunError, match=r"uses norms_of_layers = \(100\.0, 4\.0\)"):
        one.epoch()
    all_together.optimizer.max_grad_norm *= 0.5  # as schedulers of Opacus do
    with pytest.raises(UnsupportedRunError, match=r"uses max_grad_norm = 2\.5"):
        all_together.epoch()


# --- layers that are frozen in the middle of a run ------------------------------------------------


@pytest.mark.parametrize("arguments", [{}, FUNCTORCH])
def test_a_layer_is_frozen_and_trained_again(make, arguments):
    """opacus 436: it stays as it is, moments and all, and every step counts as before."""
    whole, run = (make(model=layers(), **arguments) for _ in range(2))
    ends = [weights(run)]
    for trains in (True, False, True):
        whole.epoch()
        run.plain_model[0].requires_grad_(trains)
        run.epoch()
        ends.append(weights(run))
    moved = [one != other for one, other in itertools.pairwise(ends)]
    assert moved[0].all()
    assert moved[1].tolist() == [False] * 24 + [True] * 15
    assert moved[2].all()
    assert run.engine.get_epsilon(DELTA) == whole.engine.get_epsilon(DELTA)


def test_what_a_closure_trains_again_gets_a_clip_and_noise(make):
    """A loop that toggles layers around its passes takes the steps of one that trains all."""
    ends = []
    for toggles in (False, True):
        generator = torch.Generator().manual_seed(1)
        run = make(model=layers(), batch_order="cyclic", noise_generator=generator)
        for batch in run.loader:

            def closure(run=run, batch=batch):
                run.plain_model[0].requires_grad_(True)
                run.backward(batch)

            run.plain_model[0].requires_grad_(not toggles)
            run.optimizer.step(closure)
        ends.append(weights(run))
    np.testing.assert_array_equal(*ends)


def test_the_clip_is_then_that_of_what_is_trained(make):
    """Without noise the step is the sum of the clipped gradients of the layers that are left."""
    run = make(model=layers(), noise_multiplier=0.0, max_grad_norm=0.1, batch_order="cyclic")
    run.plain_model[0].requires_grad_(False)
    records, labels = next(iter(run.loader))
    plain, expected = layers(), 0
    for record, label in zip(records, labels, strict=True):
        loss = functional.cross_entropy(plain(record[None]), label[None])
        gradients = torch.autograd.grad(loss, [plain[2].weight, plain[2].bias])
        norm = np.linalg.norm(flat(gradients))
        expected += gradients[0] * min(1.0, 0.1 / (norm + 1e-6)) / 10
    run.step((records, labels))
    torch.testing.assert_close(run.plain_model[2].weight.grad, expected)


def test_what_was_not_trained_at_the_start_stays_frozen(make):
    module = layers()
    module[0].requires_grad_(False)
    run = make(model=module)
    module[0].requires_grad_(True)
    with pytest.raises(UnsupportedRunError, match=r"trains \['0.weight'.* can only shrink"):
        run.epoch()


@pytest.mark.parametrize(
    "arguments",
    [{"clipping": "per_layer", "max_grad_norm": [1.0] * 4}, GHOST],
)
def test_where_opacus_looks_at_all_parameters_none_is_frozen_later(make, arguments):
    run = make(model=layers(), batch_order="cyclic", **arguments)
    run.epoch()
    run.plain_model[0].requires_grad_(False)
    with pytest.raises(UnsupportedRunError, match="Expected the trainable parameters of the start"):
        run.epoch()


# --- half precision -------------------------------------------------------------------------------


def halved(run):
    dtype = next(run.plain_model.parameters()).dtype
    return ((records.to(dtype), labels) for records, labels in run.loader)


@pytest.mark.parametrize(
    ("module", "dtype", "base"),
    [
        (layers, torch.bfloat16, torch.optim.Adam),
        (lambda: nn.Linear(5, 3), torch.float16, torch.optim.SGD),  # Adam divides by 0 there
    ],
)
def test_parameters_in_half_precision(make, module, dtype, base):
    run, single = make(base, {"lr": 0.1}, module().to(dtype)), make(base, model=module())
    before = weights(run)
    run.epoch(halved(run))
    single.epoch()
    assert (weights(run) != before).all()
    assert run.engine.get_epsilon(DELTA) == single.engine.get_epsilon(DELTA)
    assert any("noise is drawn, in float32" in text for text in assumed(run, Status.CHECKED))


def test_a_record_counts_for_its_clip_norm_in_half_precision(make):
    """In bfloat16 the sum of 1028 gradients is 1024, that of 1029 is 1032."""
    sums = []
    for last in (0.0, 1.0):
        model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
        records = torch.ones(1029, 1, dtype=torch.bfloat16)
        records[-1] = last
        run = make(
            torch.optim.SGD, model=model, loader={"dataset": TensorDataset(records)},
            max_grad_norm=1.0, batch_order="full", criterion=None, loss_reduction="sum",
        )  # fmt: skip
        for (inputs,) in run.loader:
            run.model(inputs).sum().backward()
            run.optimizer.step()
        sums.append(float(model.weight.summed_grad))
    assert sums[1] - sums[0] == pytest.approx(1.0, rel=1e-4)


# --- what reaches the parameters beside the records, and the inputs through the model -------------


def trained(run, penalty=0.0, between=None):
    for records, labels in run.loader:
        run.optimizer.zero_grad()
        loss = functional.cross_entropy(run.model(records), labels)
        (loss + penalty * sum(p.square().sum() for p in run.plain_model.parameters())).backward()
        if between is not None:
            between()
        run.optimizer.step()
    return weights(run)


@pytest.mark.parametrize("penalty", [1e-3, 100.0])
def test_a_penalty_is_refused_of_a_head_and_has_no_effect_elsewhere(make, make_run, penalty):
    """Nor has the clip of the sum that stock scripts have."""
    beside = r"something beside the outputs of .*\(a penalty in the loss.* weight_decay"
    with pytest.raises(UnsupportedRunError, match=beside):
        trained(make_run(), penalty)
    runs = [make(model=layers(), noise_multiplier=0.0, batch_order="cyclic") for _ in range(2)]
    clip = functools.partial(nn.utils.clip_grad_norm_, runs[1].plain_model.parameters(), 1e-3)
    np.testing.assert_array_equal(trained(runs[0]), trained(runs[1], penalty, clip))


@pytest.mark.parametrize("module", [lambda: nn.Linear(5, 3), layers])
def test_an_encoder_outside_gets_its_gradient(make, module):
    """That of the loss, without noise, as in Opacus."""
    run, encoder = make(model=module(), noise_multiplier=0.0, batch_order="cyclic"), nn.Linear(5, 5)
    for records, labels in run.loader:
        run.optimizer.zero_grad()
        encoder.zero_grad()
        records.requires_grad_()
        plain = module()
        plain.load_state_dict(run.plain_model.state_dict())
        expected = torch.autograd.grad(
            functional.cross_entropy(plain(encoder(records)), labels), [records, encoder.weight]
        )
        functional.cross_entropy(run.model(encoder(records)), labels).backward()
        torch.testing.assert_close([records.grad, encoder.weight.grad], list(expected))
        run.optimizer.step()


# --- what is refused ------------------------------------------------------------------------------


def leave_out(names):
    return f"Expected torch.optim.SGD, got Adam.*Or leave out {names}.*: any optimizer is accounted"


HALF = {"model": layers().to(torch.bfloat16)}
LAYERS_OF_HALF = {**HALF, "clipping": "per_layer", "max_grad_norm": [1.0] * 4}
PROX = {"after": Regulariser(l1=0.1)}


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (
            {"feature_norm": 1.0, "loss_geometry": "auto"},
            UnsupportedRunError,
            leave_out("criterion, feature_norm"),
        ),
        (
            {"loss_geometry": LossGeometry.convex(1.0)},
            UnsupportedRunError,
            leave_out("loss_geometry"),
        ),
        (PROX, UnsupportedRunError, leave_out("after")),
        ({"schedule": 0.01}, UnsupportedRunError, leave_out("schedule")),
        ({**PER_LAYER, "max_grad_norm": 1.0}, ValueError, "a list of 2 clip norms"),
        ({**PER_LAYER, "max_grad_norm": [1.0, 0.0]}, ValueError, "max_grad_norm"),
        ({**PER_LAYER, **GHOST}, UnsupportedRunError, 'with grad_sample_mode="ghost"'),
        ({**PER_LAYER, **PROX, "base": torch.optim.SGD}, UnsupportedRunError, '"per_layer" is acc'),
        ({**HALF, **GHOST}, UnsupportedRunError, "parameters in half precision"),
        (LAYERS_OF_HALF, UnsupportedRunError, "parameters in half precision"),
        ({**HALF, "mechanism": DiceSGD()}, UnsupportedRunError, "float32 or float64"),
    ],
)
def test_arguments_that_are_refused(make, arguments, error, text):
    with pytest.raises(error, match=text):
        make(**arguments)
