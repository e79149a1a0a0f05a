"""A run that Opacus' engine accepts has no larger epsilon on ours, and the same algorithm.

Every row of the table is trained for a few steps by both engines, with the same call. Our epsilon
is compared with those of Opacus' PRV and RDP accountants for what Opacus' own engine recorded, and
with that of dp-accounting's PLD for the same history. All are for the same neighbours: a record is
added or removed.
"""

import contextlib
import functools

import dp_accounting
import pytest
import torch
from cases import first
from dp_accounting import NeighboringRelation
from dp_accounting.pld import PLDAccountant
from opacus import PrivacyEngine
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.schedulers import ExponentialGradClip, ExponentialNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset

from hidden_state_accountants import BatchOrder
from hidden_state_adapters.opacus import Batches, HiddenStatePrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning")

RECORDS, DELTA = 60, 1e-5
SMALL_NOISE = 0.2  # below it dp-accounting's PLD takes ten seconds, and agrees with PRV
CHEAP_RATE = 0.2  # above it, too
ROUNDING = 1e-3  # what both accountants add to be on the safe side, relative


def groups_that_differ(params):
    first, *others = params
    return torch.optim.SGD(
        [{"params": [first], "lr": 0.1}, {"params": others, "lr": 0.01, "weight_decay": 0.1}]
    )


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=20.0),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "groups": groups_that_differ,
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
}


def one_cycle(optimizer):
    return [OneCycleLR(optimizer, max_lr=0.1, total_steps=64)]


def schedules_of_noise_and_clip(optimizer):
    return [ExponentialNoise(optimizer, gamma=0.9), ExponentialGradClip(optimizer, gamma=0.9)]


IN_PIECES = {"physical": 4}
# optimizer, arguments of make_private, options of the loader, options of the loop
ROWS = [
    ("sgd", {}, {}, {}),
    ("adam", {"grad_sample_mode": "functorch"}, {}, IN_PIECES),
    ("adam", {"grad_sample_mode": "ghost"}, {"batch_size": 60}, {}),
    (
        "sgd",
        {"clipping": "per_layer", "max_grad_norm": [0.5, 0.3, 1.0, 0.1]},
        {"batch_size": 16},
        {},
    ),
    ("sgd", {"loss_reduction": "sum"}, {}, {}),
    ("sgd", {"noise_multiplier": 0.5}, {"batch_size": 7}, {}),
    ("sgd", {}, {"batch_size": 1}, {}),
    ("sgd", {}, {}, {"schedule": one_cycle}),
    *((name, {}, {}, {}) for name in list(OPTIMIZERS)[1:]),
    ("sgd", {"noise_multiplier": 0.12}, {}, {}),  # an epsilon of 228
    ("adam", {"noise_multiplier": 6.0}, {"batch_size": 16}, {}),
    ("sgd", {}, {"batch_size": 64}, {}),
    ("adam", {"rand_on_empty": False, "clipping": "flat", "batch_first": True}, {}, {}),
    ("sgd", {"grad_sample_mode": "hooks", "poisson_sampling": True}, {}, {}),
    # Loops and loaders of Opacus' documentation.
    ("adam", {}, {}, {"schedule": schedules_of_noise_and_clip}),
    ("adam", {}, {"shuffle": False, "sampler": SubsetRandomSampler(range(RECORDS))}, IN_PIECES),
    ("adam", {}, {"drop_last": True, "batch_size": 16}, IN_PIECES),
    ("adam", {}, {"num_workers": 1}, IN_PIECES),
]


def train(engine, optimizer, arguments, options, *, physical=None, schedule=lambda _: ()):
    """An epoch of the loop of Opacus' tutorials, with the same call for both engines."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    data = TensorDataset(torch.randn(RECORDS, 5), torch.arange(RECORDS) % 3)
    criterion = nn.CrossEntropyLoss(reduction=arguments.get("loss_reduction", "mean"))
    mode = {"criterion": criterion} if arguments.get("grad_sample_mode") == "ghost" else {}
    settings = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, **arguments, **mode}
    given = DataLoader(data, **{"batch_size": 10, "shuffle": True, **options})
    if isinstance(engine, HiddenStatePrivacyEngine):
        count = len(given)  # rate and divisor are constants that happen to be those of Opacus
        settings["batch_order"] = Batches(
            "poisson", sampling_rate=1 / count, batch_size=RECORDS // count
        )
    model, private, *rest, loader = engine.make_private(
        module=model,
        optimizer=OPTIMIZERS[optimizer](list(model.parameters())),
        data_loader=given,
        **settings,
    )
    criterion, scheduled = rest[0] if rest else criterion, schedule(private)
    manager = contextlib.nullcontext(loader)
    if physical:
        manager = BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=physical, optimizer=private
        )
    with manager as pieces:
        for features, labels in pieces:
            private.zero_grad()
            criterion(model(features), labels).backward()
            private.step()
            for scheduler in scheduled:
                scheduler.step()
    return engine


@functools.cache
def stock_epsilons(history):
    """What stock accountants say of a history of Opacus."""
    found = {}
    for accountant in (PRVAccountant(), RDPAccountant()):
        accountant.history = list(history)
        found[type(accountant).__name__] = accountant.get_epsilon(DELTA)
    if len(history) > 1 or history[0][0] < SMALL_NOISE or history[0][1] > CHEAP_RATE:
        return found
    pld = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
    for noise, rate, steps in history:
        gaussian = dp_accounting.GaussianDpEvent(noise)
        pld.compose(dp_accounting.PoissonSampledDpEvent(rate, gaussian), steps)
    found["PLD"] = pld.get_epsilon(DELTA)
    return found


@pytest.mark.parametrize(("optimizer", "arguments", "options", "loop"), first(5, ROWS))
def test_epsilon_is_no_larger(optimizer, arguments, options, loop):
    engine = HiddenStatePrivacyEngine(neighboring_relation="ADD_OR_REMOVE_ONE")
    own, stock = (
        train(each, optimizer, arguments, options, **loop) for each in (engine, PrivacyEngine())
    )
    event, history = own.privacy_event, stock.accountant.history
    assert event.batch_order is BatchOrder.POISSON
    assert sum(steps for *_, steps in history) == event.num_steps
    assert {rate for _, rate, _ in history} == {event.sampling_probability}
    best = min(stock_epsilons(tuple(history)).values())
    assert 0 < own.get_epsilon(DELTA) <= best * (1 + ROUNDING)
