"""What a stock engine claims, beside what its batches allow."""

import math
import warnings

import dp_accounting
import pytest
import torch
from cases import first
from opacus import PrivacyEngine
from opacus.schedulers import ExponentialNoise
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_accountants import BatchOrder
from hidden_state_adapters.opacus import HiddenStatePrivacyEngine
from hidden_state_adapters.opacus.explain import explain_engine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

RECORDS, DELTA = 240, 1e-5


def gaussian(mu):
    """Epsilon of one Gaussian mechanism with sensitivity mu and noise 1."""
    accountant = hsa.LastIterateAccountant().compose(dp_accounting.GaussianDpEvent(1 / mu))
    return accountant.get_epsilon(DELTA)


def trained(*, epochs=3, accountant="prv", given=False, scheduled=False, accumulate=1, **options):
    """A stock engine after training, and the loader of its loop: `given`, the one that went in."""
    torch.manual_seed(0)
    loader = {"batch_size": 10, "shuffle": True, **options.pop("loader", {})}
    model = nn.Linear(5, 3)
    data = TensorDataset(torch.randn(RECORDS, 5), torch.arange(RECORDS) % 3)
    original = DataLoader(data, **loader)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        engine = PrivacyEngine(accountant=accountant)
        model, optimizer, private = engine.make_private(
            module=model,
            optimizer=torch.optim.Adam(model.parameters(), lr=0.01),
            data_loader=original,
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            **options,
        )
    noise = ExponentialNoise(optimizer, gamma=0.99) if scheduled else None
    used = original if given else private
    for _ in range(epochs):
        for index, (features, labels) in enumerate(used):
            nn.functional.cross_entropy(model(features), labels).backward()
            if (index + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                if noise is not None:
                    noise.step()
    return engine, used


BATCHES = [
    ({"shuffle": False}, "cyclic", "the same order in every pass"),
    ({"batch_size": 64, "drop_last": True}, "reshuffled", "shuffled anew"),
    ({"batch_size": RECORDS}, "full", "all records in every batch"),
    ({"shuffle": False, "batch_size": 64}, "cyclic", "the same order in every pass"),
    ({"shuffle": False, "sampler": list(range(0, RECORDS, 2))}, "cyclic", "the same order"),
    ({"shuffle": False, "sampler": SubsetRandomSampler(list(range(120)))}, "reshuffled", "anew"),
]


@pytest.mark.parametrize(("loader", "order", "words"), first(3, BATCHES))
def test_a_claim_for_other_batches(loader, order, words):
    """Each record takes part once in each of three passes: 3 Gaussian mechanisms of noise 1."""
    engine, used = trained(loader=loader, poisson_sampling=False)
    found = explain_engine(engine, used, DELTA)
    assert found.order is BatchOrder(order)
    assert found.claimed == engine.get_epsilon(DELTA)
    assert found.proven == pytest.approx(gaussian(math.sqrt(3)), rel=1e-6)
    assert found.num_steps == 3 * len(used)
    assert words in str(found)
    assert "REPLACE_SPECIAL" in str(found)
    if order == "full":
        assert found.is_covered
        assert "no smaller, but it is about other batches" in str(found)
    else:
        assert not found.is_covered
        assert found.claimed < 0.9 * found.proven
        assert "The claim is NOT one of this run." in str(found)
        assert "HiddenStatePrivacyEngine" in str(found)


def test_the_loader_that_went_in():
    """Made private with Poisson batches, trained on shuffled ones: opacus #80."""
    engine, used = trained(given=True)
    found = explain_engine(engine, used, DELTA)
    assert found.order is BatchOrder.RESHUFFLED
    assert found.claimed < 0.4 * found.proven
    assert "NOT one of this run" in str(found)


@pytest.mark.parametrize("accountant", ["prv", "rdp"])
def test_poisson_batches(accountant):
    engine, used = trained(accountant=accountant)
    found = explain_engine(engine, used, DELTA)
    assert found.order is BatchOrder.POISSON
    assert found.proven <= found.claimed == engine.get_epsilon(DELTA)
    assert found.is_covered
    assert str(found).endswith("The claim is one of this run.")
    assert "ADD_OR_REMOVE_ONE" in str(found)


def test_an_accountant_that_claims_too_little():
    """gdp is an approximation by the central limit theorem."""
    engine, used = trained(accountant="gdp", epochs=1)
    found = explain_engine(engine, used, DELTA)
    assert found.claimed < found.proven
    assert "The claim is too small for these batches" in str(found)


def test_the_loader_of_the_loop_samples_at_a_higher_rate():
    engine, _ = trained()
    _, other = trained(loader={"batch_size": 60})
    low = explain_engine(engine, trained()[1], DELTA)
    high = explain_engine(engine, other, DELTA)
    assert high.proven > 2 * low.proven
    assert not high.is_covered


def test_noise_on_a_schedule():
    """The smallest noise of every pass counts."""
    engine, used = trained(given=True, scheduled=True, epochs=1)
    mu = 0.99**-23
    assert explain_engine(engine, used, DELTA).proven == pytest.approx(gaussian(mu), rel=1e-6)


def test_before_the_first_step():
    engine, used = trained(epochs=0, poisson_sampling=False)
    found = explain_engine(engine, used)
    assert (found.num_steps, found.claimed, found.proven) == (0, None, None)
    assert not found.is_covered
    assert "no step was taken yet" in str(found)


def with_replacement():
    engine, _ = trained(epochs=1)
    data = TensorDataset(torch.randn(RECORDS, 5), torch.arange(RECORDS) % 3)
    sampler = RandomSampler(data, replacement=True)
    return engine, DataLoader(data, batch_size=10, sampler=sampler)


def repeated_indices():
    engine, _ = trained(epochs=1)
    data = TensorDataset(torch.randn(RECORDS, 5), torch.arange(RECORDS) % 3)
    return engine, DataLoader(data, batch_size=10, sampler=[0, 0, 1])


def accumulated_batches():
    return trained(epochs=1, poisson_sampling=False, accumulate=2)


@pytest.mark.parametrize("case", [with_replacement, repeated_indices, accumulated_batches])
def test_batches_that_no_bound_is_about(case):
    found = explain_engine(*case(), DELTA)
    assert found.proven is None
    assert found.relation is None
    assert not found.is_covered
    assert "proven: nothing here" in str(found)
    assert "NOT one of this run" in str(found)


def test_what_is_not_explained():
    engine, used = trained(epochs=0)
    model = nn.Linear(5, 3)
    own = HiddenStatePrivacyEngine()
    *_, private = own.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(used.dataset, batch_size=10),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for wrong in ((own, used), (engine, private), ("engine", used)):
        with pytest.raises(TypeError, match=r"use engine\.report\(delta\)"):
            explain_engine(*wrong)
    with pytest.raises(TypeError, match=r"and the torch.utils.data.DataLoader"):
        explain_engine(engine, list(used))
    with pytest.raises(ValueError, match="target_delta"):
        explain_engine(engine, used, 2.0)
