"""What is looked at in every step, not in the first ones only, and what the report says of it."""

import contextlib
import copy

import numpy as np
import pytest
import torch
from opacus_runs import in_pieces, layers, weights
from torch import nn
from torch.utils.data import TensorDataset

import hidden_state_accountants as hsa
from hidden_state_accountants import UnsupportedRunError
from hidden_state_accountants.guarantee import Status
from hidden_state_adapters.opacus import BlockCoordinate, DiceSGD

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

LATE = 4  # the index of the first batch that holds a record of norm 3


def data():
    """Unit rows but for one, which the loop's guard divides with all others of its batch."""
    features = nn.functional.normalize(torch.randn(60, 5, generator=torch.manual_seed(1)))
    features[10 * LATE] *= 3
    return TensorDataset(features, torch.arange(60) % 3)


def guarded(features):
    return features / features.norm(dim=1).max().clamp(min=1.001)


UNKNOWN = {"loss_geometry": None, "criterion": None}
KINDS = {
    "known loss": {},
    "DiceSGD of a known loss": {"mechanism": DiceSGD(), "max_grad_norm": 0.1},
    "declared loss of a head": {"loss_geometry": hsa.LossGeometry.convex(1.0, lipschitz=20.0)},
    "DiceSGD": {**UNKNOWN, "model": layers, "mechanism": DiceSGD(), "max_grad_norm": 0.1},
    "blocks": {**UNKNOWN, "mechanism": BlockCoordinate(), "sgd": {"weight_decay": 0.0}},
}


def a_run(make_run, kind, **more):
    arguments = {**KINDS[kind], **more}
    model = arguments.pop("model", lambda: nn.Linear(5, 3))()
    return make_run(
        model=model, loader={"dataset": arguments.pop("data", None) or data()}, **arguments
    )


GUARDED = [
    *((kind, False) for kind in KINDS),
    *((kind, True) for kind in KINDS if kind != "blocks"),
]


@pytest.mark.parametrize(("kind", "is_cut"), GUARDED)
def test_a_guard_that_acts_late_is_refused(make_run, kind, is_cut):
    run = a_run(make_run, kind)
    with (
        in_pieces(run, 4) if is_cut else contextlib.nullcontext(run.loader) as loader,
        pytest.raises(UnsupportedRunError, match="step 5: what went into the model is not"),
    ):
        run.epoch((guarded(x) if x.norm(dim=1).max() > 2 else x, y) for x, y in loader)
    assert run.steps == LATE


class Scaled(nn.Module):
    """Takes numbers and objects beside the records."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 3)

    def forward(self, features, by):
        return self.head(features * getattr(by, "scale", by))


class Box:
    def __init__(self, scale):
        self.scale = scale


class Numbers(list):
    scale = 1.0


BOX = Box(1.0)


@pytest.mark.parametrize(
    ("by", "text"),
    [
        (lambda x, i: 1 / max(1.001, x.norm(dim=1).max().item()), "step 5.*float"),
        (lambda x, i: Box(guarded(x) / x), "step 2.*Box"),
        (lambda x, i: Numbers([0.999] * i), "step 2.*float"),
        (lambda x, i: 0.999, None),
        (lambda x, i: BOX, None),
        (lambda x, i: i // 99 + 1, None),
    ],
)
def test_what_goes_in_beside_the_records(make_run, by, text):
    """A guard may be a number, or in an object."""
    run = a_run(make_run, "declared loss of a head", model=Scaled, feature_norm=None)

    def epoch():
        for i, (features, labels) in enumerate(run.loader):
            run.optimizer.zero_grad()
            nn.functional.cross_entropy(run.model(features, by(features, i)), labels).backward()
            run.optimizer.step()

    refused = pytest.raises(UnsupportedRunError, match=f"{text} than in the first pass")
    with refused if text else contextlib.nullcontext():
        epoch()


LISTED = [
    ({}, 1.0, Status.CHECKED, "tensor that went into the model"),
    ({"loop_maps_records": True}, 0.3, Status.DECLARED, "no mixup"),
]


@pytest.mark.parametrize(("arguments", "factor", "status", "text"), LISTED)
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_loop_does_with_records(make_run, dataset, kind, arguments, factor, status, text):
    """Moved, cast and reshaped they are the same; what else it does is declared."""
    unit = TensorDataset(dataset.tensors[0].view(60, 1, 5), dataset.tensors[1])
    run = a_run(make_run, kind, data=unit, **arguments)
    run.epoch((factor * x.view(-1, 5).clone().float(), y) for x, y in run.loader)
    names = "tensor that went into the model", "loop_maps_records"
    (line,) = [a for a in run.engine.assumptions if any(name in a.text for name in names)]
    assert line.status is status
    assert text in line.text


@pytest.mark.parametrize("length", [7, 10])  # as many as records, too
def test_records_in_the_second_dimension(make_run, length):
    class Mean(nn.Sequential):
        def forward(self, x):
            return super().forward(x).mean(0)

    sequences = TensorDataset(torch.randn(60, length, 5), torch.arange(60) % 3)
    arguments = {"model": lambda: Mean(layers()), "data": sequences, "batch_first": False}
    run = a_run(make_run, "DiceSGD", **arguments)
    run.epoch((x.movedim(0, 1), y) for x, y in run.loader)
    x, y = next(iter(run.loader))
    with pytest.raises(UnsupportedRunError, match="not what the loader drew"):
        run.step((x.flip(0).movedim(0, 1), y))


@pytest.mark.parametrize(
    ("place", "arguments"), [(0, {}), (1, {}), (1, {"loop_maps_records": True})]
)
def test_a_batch_that_is_written_late_is_refused(make_run, place, arguments):
    """The targets are those that were drawn, whatever the loop maps."""
    run = make_run(**arguments)

    def written():
        for index, batch in enumerate(run.loader):
            if index >= LATE:
                batch[place].copy_(batch[place].flip(0))
            yield batch

    with pytest.raises(UnsupportedRunError, match="changed in place"):
        run.epoch(written())
    assert run.steps == LATE


# --- the weights of the pass ----------------------------------------------------------------------


def functional(run, features):
    own = {name: p + 1.0 for name, p in run.plain_model.named_parameters()}
    return torch.func.functional_call(run.plain_model, own, features)


def swapped(run, features):
    head, weight = run.plain_model, run.plain_model.weight
    head.weight = nn.Parameter(weight + 1.0)
    output = run.model(features)
    head.weight = weight
    return output


def hooked(register, change=lambda *_: None):
    def output(run, features):
        handle = getattr(run.plain_model, register)(change, prepend=True)
        found = run.model(features)
        handle.remove()
        return found

    return output


def exchanged(run, features):
    """Another hook in the place of one that was there in the first pass."""
    run.plain_model._forward_pre_hooks.popitem()
    return hooked("register_forward_pre_hook")(run, features)


MOVED, HOOKS = "changed outside|got others", "hooks of the first"
PASSES = [
    (functional, MOVED),
    (swapped, MOVED),
    (exchanged, HOOKS),
    (hooked("register_forward_hook", lambda head, args, output: output + 1.0), HOOKS),
    (hooked("register_forward_pre_hook", lambda head, args: (args[0].flip(0),)), HOOKS),
    (hooked("register_full_backward_hook"), HOOKS),
]


@pytest.mark.parametrize(("output_of", "text"), PASSES)
@pytest.mark.parametrize(
    "kind", ["known loss", "DiceSGD of a known loss", "declared loss of a head"]
)
def test_outputs_of_other_weights_are_refused(make_run, dataset, kind, output_of, text):
    """Nothing is left behind when the step is taken."""
    run = a_run(make_run, kind, data=dataset)
    run.plain_model.register_forward_pre_hook(lambda head, args: None)
    batches = iter(run.loader)
    for _ in range(3):
        run.step(next(batches))
    x, y = next(batches)

    def step():
        run.optimizer.zero_grad()
        run.criterion(output_of(run, x), y).backward()
        run.optimizer.step()

    with pytest.raises(UnsupportedRunError, match=text):
        step()
    assert run.steps == 3


def patched(run):
    forward = run.plain_model.forward
    run.plain_model.forward = lambda x: 3 * forward(x)
    run.epoch()


def with_a_small_further_term(run):
    for x, y in run.loader:
        run.optimizer.zero_grad()
        output = run.model(x)
        logs = output.log_softmax(dim=1)
        (run.criterion(output, y) + 3e-3 * (logs.exp() * logs).sum(dim=1).mean()).backward()
        run.optimizer.step()


@pytest.mark.parametrize("epoch", [patched, with_a_small_further_term])
def test_outputs_are_computed_from_the_own_copy(make_run, epoch):
    """Whatever else happens to the outputs that a layer hands out."""
    plain, run = (make_run(noise_generator=torch.Generator().manual_seed(1)) for _ in range(2))
    plain.epoch()
    epoch(run)
    assert run.engine.get_epsilon(1e-5) == plain.engine.get_epsilon(1e-5)
    np.testing.assert_array_equal(weights(run), weights(plain))


def test_outputs_that_are_changed_in_place_are_refused(make_run):
    run = make_run()
    x, y = next(iter(run.loader))
    output = run.model(x)
    with torch.no_grad():
        output[0] += output[1]
    run.criterion(output, y).backward()
    with pytest.raises(UnsupportedRunError, match="or came out, was changed in place"):
        run.optimizer.step()


def write(run):
    """As averages of weights are put in: torch does not count it."""
    run.plain_model.weight.data.add_(1.0)


def load(run):
    state = run.plain_model.state_dict()
    run.plain_model.load_state_dict({name: value + 1 for name, value in state.items()})


@pytest.mark.parametrize("change", [write, load])
@pytest.mark.parametrize("kind", ["known loss", "DiceSGD of a known loss", "blocks"])
def test_weights_that_change_after_the_pass(make_run, kind, change):
    """A step that is computed here moves the own copy of the iterate."""
    head = nn.Linear(5, 3)
    plain, run = (
        a_run(make_run, kind, noise_multiplier=0.0, model=lambda: copy.deepcopy(head))
        for _ in range(2)
    )
    for each in (plain, run):
        each.backward(next(iter(each.loader)))
    change(run)
    if kind == "blocks":
        with pytest.raises(UnsupportedRunError, match=r"step 1: .*changed outside"):
            run.optimizer.step()
        return
    for each in (plain, run):
        each.optimizer.step()
    np.testing.assert_array_equal(weights(run), weights(plain))


@pytest.mark.parametrize("mechanism", [None, DiceSGD(), BlockCoordinate(l2=0.1)])
def test_a_known_loss_takes_the_steps_of_per_example_gradients(make_run, mechanism):
    """The clip acts on some records."""
    loss = hsa.LossGeometry.convex(1.0) if mechanism is None else None
    ends = []
    for more in ({}, {"loss_geometry": loss, "criterion": None}):
        run = make_run(
            mechanism=mechanism, max_grad_norm=1.0, sgd={"weight_decay": 0.0},
            noise_multiplier=0.0, **more,
        )  # fmt: skip
        run.epoch()
        ends.append(weights(run))
    np.testing.assert_allclose(*ends, rtol=1e-5, atol=1e-6)


# --- the features of a head -----------------------------------------------------------------------


class OnItsOutputs(nn.Module):
    """Shares the weights of two layers."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 5, bias=False)

    def forward(self, features):
        return self.head(torch.sigmoid(self.head(features)) / 3)


def test_a_head_on_its_own_outputs_is_no_linear_model(make_run):
    run = make_run(model=OnItsOutputs())
    with pytest.raises(UnsupportedRunError, match="features that do not depend on the linear"):
        run.epoch()


class WithFeatures(nn.Module):
    """A model that returns its features if it is asked to."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(5, 5).requires_grad_(False)
        self.head = nn.Linear(5, 3)

    def forward(self, records, returns_features=False):
        features = torch.sigmoid(self.body(records)) / 3
        return features if returns_features else self.head(features)


def test_features_that_the_loop_mixes_before_the_head(make_run):
    run = make_run(model=WithFeatures())
    records, labels = next(iter(run.loader))
    features = run.model(records, returns_features=True)
    mixed = (features + features.mean(dim=0)) / 2
    run.criterion(run.plain_model.head(mixed), labels).backward()
    with pytest.raises(UnsupportedRunError, match="is not what the loader drew"):
        run.optimizer.step()


def test_the_norm_of_features_goes_with_a_known_loss(make_run):
    with pytest.raises(UnsupportedRunError, match=r"feature_norm = None here, got 1\.0"):
        make_run(criterion=None)
