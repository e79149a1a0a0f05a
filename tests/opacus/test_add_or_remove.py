"""ADD_OR_REMOVE_ONE: nothing that is shown may be computed from the number of records."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import Batches, DiceSGD, HiddenStatePrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DELTA = 1e-5
CONSTANTS = Batches("poisson", sampling_rate=1 / 7, batch_size=18)
MECHANISM = {"mechanism": DiceSGD(gradient_bound=50.0)}


def start(records, target=None, **arguments):
    """An engine for so many records, with what make_private returned; b = 20 in the loader."""
    model = nn.Linear(3, 2)
    engine = HiddenStatePrivacyEngine(neighboring_relation="add_or_remove_one")
    data = TensorDataset(torch.randn(records, 3), torch.arange(records) % 2)
    make, given = engine.make_private, {"noise_multiplier": 20.0}
    if target is not None:
        make = engine.make_private_with_epsilon
        given = {"target_epsilon": target, "target_delta": DELTA, "epochs": 2}
    model, optimizer, loader = make(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        data_loader=DataLoader(data, batch_size=20),
        max_grad_norm=1.0,
        **given,
        **arguments,
    )
    return engine, model, optimizer, loader


def epoch(model, optimizer, loader):
    for features, labels in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(features), labels).backward()
        optimizer.step()


@pytest.mark.parametrize("target", [None, 1.0])
@pytest.mark.parametrize("arguments", [{}, MECHANISM])
def test_rate_and_divisor_of_the_loader_are_refused(arguments, target):
    """They are 1/7 and 18 of 126 records, and 1/7 and 17 of 125."""
    with pytest.raises(hsa.UnsupportedRunError, match=r"sampling_rate=q, batch_size=b"):
        start(126, target, **arguments)


@pytest.mark.parametrize("arguments", [{}, MECHANISM])
def test_nothing_follows_from_the_number_of_records(arguments):
    found = []
    for records in (126, 125, 300):
        engine, model, optimizer, loader = start(records, batch_order=CONSTANTS, **arguments)
        epoch(model, optimizer, loader)
        found.append(
            (
                optimizer.expected_batch_size,
                len(loader),
                engine.privacy_event,
                engine.get_epsilon(DELTA),
                engine.report(DELTA),
            )
        )
    assert found[0][:2] == (18, 7)
    assert found[0] == found[1] == found[2]


def test_noise_for_a_target_does_not_either():
    noises = {start(n, 1.0, batch_order=CONSTANTS)[2].noise_multiplier for n in (126, 125)}
    assert len(noises) == 1


def test_every_record_at_rate_1():
    engine, *private = start(30, batch_order=Batches("poisson", sampling_rate=1, batch_size=20))
    epoch(*private)
    assert engine.privacy_event.num_steps == 1


@pytest.mark.parametrize(
    ("order", "arguments", "name"),
    [
        (CONSTANTS, {"criterion": nn.CrossEntropyLoss(), "feature_norm": 9.0}, "loss_geometry"),
        (
            Batches("poisson", sampling_rate=1 / 7, batch_size=18, max_batch_size=100),
            {},
            "max_batch_size",
        ),
    ],
)
def test_bounds_on_the_sizes_of_batches_are_refused(order, arguments, name):
    with pytest.raises(hsa.UnsupportedRunError, match=rf"Expected {name}.* number of records"):
        start(126, batch_order=order, **arguments)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"sampling_rate": 0.1}, "sampling_rate and batch_size, or neither"),
        ({"batch_size": 3}, "sampling_rate and batch_size, or neither"),
        ({"sampling_rate": 0.0, "batch_size": 3}, "sampling_rate > 0"),
        ({"sampling_rate": 1.5, "batch_size": 3}, "sampling_rate <= 1"),
        ({"sampling_rate": 0.1, "batch_size": 0}, "batch_size >= 1"),
    ],
)
def test_what_constants_may_be(arguments, text):
    with pytest.raises(ValueError, match=text):
        Batches("poisson", **arguments)


def test_constants_of_other_batches():
    with pytest.raises(ValueError, match="POISSON"):
        Batches("cyclic", sampling_rate=0.1, batch_size=3)


def test_batches_are_drawn_at_the_constant_rate(make_run):
    """Of 60 records at a rate of 0.9; the hidden state is that of the number of records."""
    batches = Batches("poisson", sampling_rate=0.9, batch_size=50)
    run = make_run(batch_order=batches, noise_multiplier=4.0)
    sizes = []
    for _ in range(10):
        for batch in run.loader:
            sizes.append(len(batch[0]))
            run.step(batch)
    assert len(run.loader) == 2
    assert abs(sum(sizes) - 20 * 54) < 6 * (20 * 60 * 0.9 * 0.1) ** 0.5
    event = run.engine.privacy_event
    assert (event.sampling_rate, event.batch_size, event.dataset_size) == (0.9, 50, 60)
