"""DiceSGD and DiceAdam in PyTorch: every step is that of the paper."""

import math

import numpy as np
import pytest
import torch
from dice import adam_step, automatic_step, sgd_step
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus_dice import (
    CLIP,
    DIVISOR,
    ERROR_CLIP,
    RATE,
    VARIANTS,
    backward,
    batches,
    error_of,
    flat,
    layers,
    make,
    train,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hidden_state_adapters.opacus import DiceSGDOptimizer
from hidden_state_adapters.opacus.gradients.norms import clip_factors, joint_norms, smallest_norm

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def per_example(model):
    samples = [
        p.grad_sample.reshape(len(p.grad_sample), math.prod(p.shape)) for p in model.parameters()
    ]
    return torch.cat(samples, dim=1).cpu().numpy().astype(float)


class Reference:
    """The steps of tests/reference/dice.py on one vector."""

    def __init__(self, variant, x, rate=RATE):
        self.variant, self.x, self.rate = variant, x, rate
        self.error, self.moments, self.steps = np.zeros_like(x), (0.0, 0.0), 0

    def step(self, gradients, noise):
        self.steps += 1
        common = {"learning_rate": self.rate, "divisor": DIVISOR, "clip_norm": CLIP}
        state = self.x, self.error
        if self.variant == "automatic":
            self.x, self.error = automatic_step(*state, gradients, noise, **common)
        elif self.variant == "sgd":
            self.x, self.error = sgd_step(
                *state, gradients, noise, error_clip_norm=ERROR_CLIP, **common
            )
        else:
            self.x, self.error, self.moments = adam_step(
                *state, self.moments, self.steps, gradients, noise,
                error_clip_norm=ERROR_CLIP, **common,
            )  # fmt: skip


# --- the steps of the paper -----------------------------------------------------------------------


@pytest.mark.parametrize("noise_multiplier", [0.0, 0.7])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_step_is_that_of_the_paper(variant, noise_multiplier):
    """Several layers, batches of any size, an empty one, given noise; to rounding."""
    model, optimizer = make(
        variant,
        noise_multiplier=noise_multiplier,
        generator=torch.Generator().manual_seed(5),
    )
    same_noise = torch.Generator().manual_seed(5)
    reference = Reference(variant, flat(model.parameters()))
    largest_error = 0.0
    for features in batches([4, 6, 0, 3, 5, 4, 4, 1, 4, 0, 7, 4]):
        optimizer.zero_grad()
        backward(model, features)
        gradients = per_example(model)
        optimizer.step()
        noise = [
            torch.normal(0.0, 1.0, p.shape, generator=same_noise, dtype=p.dtype)
            for p in model.parameters()
        ]
        # sigma_1 on the mean update
        scale = noise_multiplier * CLIP / DIVISOR
        reference.step(gradients, scale * flat(noise) if noise_multiplier else 0.0)
        np.testing.assert_allclose(flat(model.parameters()), reference.x, atol=1e-12)
        np.testing.assert_allclose(error_of(optimizer), reference.error, atol=1e-12)
        largest_error = max(largest_error, np.linalg.norm(reference.error))
    assert largest_error > 2 * ERROR_CLIP  # both clips acted
    assert optimizer.num_steps == 12


@pytest.mark.parametrize("variant", VARIANTS)
def test_pieces_of_a_batch_are_one_step(variant):
    """Virtual steps: both sums, of clipped and of unclipped gradients, are the whole batch's."""
    runs = []
    for pieces in ([8], [3, 0, 4, 1]):
        model, optimizer = make(variant, noise_multiplier=0.5, generator=torch.Generator())
        for batch in batches([8, 8, 8]):
            for index, piece in enumerate(batch.split(pieces)):
                optimizer.signal_skip_step(do_skip=index < len(pieces) - 1)
                backward(model, piece)
                optimizer.step()
                optimizer.zero_grad()
        runs.append((flat(model.parameters()), error_of(optimizer), optimizer.num_steps))
    np.testing.assert_allclose(runs[0][0], runs[1][0], atol=1e-12)
    np.testing.assert_allclose(runs[0][1], runs[1][1], atol=1e-12)
    assert runs[0][2] == runs[1][2] == 3


def test_batch_memory_manager():
    data = TensorDataset(batches([16])[0])
    ends = []
    for size in (8, 3):
        model, optimizer = make()
        with BatchMemoryManager(
            data_loader=DataLoader(data, batch_size=8),
            max_physical_batch_size=size,
            optimizer=optimizer,
        ) as loader:
            for (features,) in loader:
                optimizer.zero_grad()
                backward(model, features)
                optimizer.step()
        assert optimizer.num_steps == 2
        ends.append(flat(model.parameters()))
    np.testing.assert_allclose(*ends, atol=1e-12)


def test_float32_stays_close():
    model, optimizer = make(model=layers(torch.float32))
    reference = Reference("sgd", flat(model.parameters()))
    for features in batches([4] * 10, torch.float32):
        optimizer.zero_grad()
        backward(model, features)
        gradients = per_example(model)
        optimizer.step()
        reference.step(gradients, 0.0)
    np.testing.assert_allclose(flat(model.parameters()), reference.x, atol=1e-5)
    np.testing.assert_allclose(error_of(optimizer), reference.error, atol=1e-5)


def test_parameter_groups_are_clipped_as_one_vector():
    ends = []
    for split in (False, True):
        model = layers()
        params = list(model.parameters())
        groups = [{"params": params[:1]}, {"params": params[1:]}] if split else params
        optimizer = DiceSGDOptimizer(
            torch.optim.SGD(groups, lr=RATE), noise_multiplier=0.0, max_grad_norm=CLIP,
            error_max_grad_norm=ERROR_CLIP, expected_batch_size=DIVISOR,
        )  # fmt: skip
        train(model, optimizer, batches([4] * 5))
        ends.append(flat(model.parameters()))
    np.testing.assert_array_equal(*ends)


@pytest.mark.parametrize(
    "options",
    [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"weight_decay": 0.1},
     {"maximize": True}],
)  # fmt: skip
def test_options_of_the_base_see_the_noisy_update_only(options):
    """The same noisy updates through torch's own optimizer give the same iterates."""
    model, optimizer = make(base_options=options, noise_multiplier=1.0, generator=torch.Generator())
    copies = [p.detach().clone().requires_grad_() for p in model.parameters()]
    plain = torch.optim.SGD(copies, lr=RATE, **options)
    for features in batches([4] * 5):
        optimizer.zero_grad()
        backward(model, features)
        optimizer.step()
        for p, q in zip(model.parameters(), copies, strict=True):
            q.grad = p.grad.clone()
        plain.step()
        np.testing.assert_array_equal(flat(model.parameters()), flat(copies))


def test_sum_reduction_scales_the_update_only():
    gradients, errors = [], []
    for reduction in ("mean", "sum"):
        model = layers(reduction=reduction)
        _, optimizer = make(model=model, loss_reduction=reduction, base_options={"lr": 0.0})
        for features in batches([4, 4, 4]):
            optimizer.zero_grad()
            loss = 3.0 * (model(features) ** 2).sum(dim=1)
            getattr(loss, reduction)().backward()
            optimizer.step()
        gradients.append(flat([p.grad for p in model.parameters()]))
        errors.append(error_of(optimizer))
    np.testing.assert_allclose(gradients[1], DIVISOR * gradients[0])
    np.testing.assert_allclose(*errors)


def test_a_closure_is_called_once():
    model, optimizer = make()
    calls = []

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        backward(model, batches([4])[0])

    optimizer.step(closure)
    assert len(calls) == optimizer.num_steps == 1


# --- what the algorithm is for --------------------------------------------------------------------


class Residual(nn.Module):
    """x - xi: its squared half has the gradient of Appendix B.1 within reach of the data."""

    def __init__(self):
        super().__init__()
        self.line = nn.Linear(1, 1, bias=False).double()
        nn.init.zeros_(self.line.weight)

    def forward(self, xi):
        return self.line(torch.ones_like(xi)) - xi


def huber(residual, bend):
    size = residual.abs()
    return torch.where(size <= bend, size**2 / 2, bend * (size - bend / 2)).sum(dim=1).mean()


def end_in_appendix_b1(make_optimizer, clip=0.5, steps=600):
    """Huber losses bent at C' = 2, records -1, -1 and 2, full batches, from 0."""
    bend = math.ceil(clip) + 1
    records = torch.tensor([[-1.0]] * bend + [[float(bend)]], dtype=torch.float64)
    model = GradSampleModule(Residual())
    optimizer = make_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), len(records), clip)
    for _ in range(steps):
        optimizer.zero_grad()
        huber(model(records), bend).backward()
        optimizer.step()
    return float(model._module.line.weight)


def test_the_bias_of_clipping_vanishes():
    """Appendix B.1 (arXiv 2311.14632): DP-SGD ends far from the optimum 0, DiceSGD does not."""

    def clipped(base, n, clip):
        return DPOptimizer(base, noise_multiplier=0.0, max_grad_norm=clip, expected_batch_size=n)

    def dice(base, n, clip):
        return DiceSGDOptimizer(
            base, noise_multiplier=0.0, max_grad_norm=clip, expected_batch_size=n
        )

    biased, unbiased = end_in_appendix_b1(clipped), end_in_appendix_b1(dice)
    # Two records at -1 pull with x + 1 each until the clip at 1/2, one at 2 with 1/2:
    # 2 (x + 1) = 1/2, and the optimum is 0.
    assert biased == pytest.approx(-0.75, abs=1e-3)
    assert unbiased == pytest.approx(0.0, abs=1e-3)


def test_dp_sgd_is_recovered_when_nothing_is_clipped():
    """The same noise, bit for bit, and no error."""
    ends = []
    for cls in (DPOptimizer, DiceSGDOptimizer):
        model = layers()
        optimizer = cls(
            torch.optim.SGD(model.parameters(), lr=0.01), noise_multiplier=1e-6,
            max_grad_norm=1e4, expected_batch_size=DIVISOR,
            generator=torch.Generator().manual_seed(2),
        )  # fmt: skip
        train(model, optimizer, batches([4] * 5))
        ends.append(flat(model.parameters()))
    np.testing.assert_array_equal(*ends)
    assert not error_of(optimizer).any()


# --- the clip -------------------------------------------------------------------------------------


def test_the_clip_is_exact():
    norms = torch.tensor([0.0, 0.3, 0.5, 2.0], dtype=torch.float64)
    factors = clip_factors(norms, 0.5, automatic=False, smallest=1e-100)
    np.testing.assert_array_equal(factors, [1.0, 1.0, 1.0, 0.25])
    factors = clip_factors(norms, 0.5, automatic=True, smallest=1e-100)
    np.testing.assert_allclose(factors * norms, [0.0, 0.5, 0.5, 0.5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_vector_is_longer_than_the_clip_norm_though_squares_underflow(dtype):
    """Coordinates of ever smaller size: a factor from a norm that underflowed would be huge."""
    smallest = smallest_norm([nn.Parameter(torch.zeros(1, dtype=dtype))])
    exponents = (
        torch.linspace(-45, 5, 400) if dtype is torch.float32 else torch.linspace(-320, 5, 400)
    )
    vectors = (torch.ones(400, 1000, dtype=torch.float64) * 10.0 ** exponents[:, None].double()).to(
        dtype
    )
    for automatic in (False, True):
        factors = clip_factors(
            joint_norms([vectors]), smallest, automatic=automatic, smallest=smallest
        )
        clipped = vectors.double() * factors.double()[:, None]
        # scaled before it is squared here, too
        lengths = clipped.abs().amax(dim=1) * math.sqrt(1000)
        assert torch.isfinite(lengths).all()
        assert lengths.max() <= smallest * (1 + 1e-5)


@pytest.mark.parametrize("secure_mode", [False, True])
def test_the_noise_on_the_mean_update_has_the_stated_deviation(secure_mode):
    """sigma_1 = noise_multiplier * C_1 / B, independent in every step and coordinate."""
    model = GradSampleModule(nn.Linear(100, 100).double())
    optimizer = DiceSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), noise_multiplier=3.0, max_grad_norm=0.2,
        error_max_grad_norm=1.0, expected_batch_size=5, generator=torch.Generator().manual_seed(1),
        secure_mode=secure_mode,
    )  # fmt: skip
    draws = []
    for _ in range(10):
        optimizer.zero_grad()
        (0.0 * model(torch.ones(2, 100, dtype=torch.float64))).sum().backward()
        optimizer.step()
        draws.append(flat([p.grad for p in model.parameters()]))
    draws = np.array(draws)
    sigma = 3.0 * 0.2 / 5
    assert draws.size == 101_000
    assert abs(draws.std() / sigma - 1) < 5 / math.sqrt(2 * draws.size)
    assert abs(draws.mean()) < 5 * sigma / math.sqrt(draws.size)
    correlation = np.corrcoef(draws)[np.triu_indices(10, 1)]
    assert np.abs(correlation).max() < 6 / math.sqrt(draws.shape[1])
    event = optimizer.privacy_event(dataset_size=5, batch_order="poisson")
    assert event.noise_std == pytest.approx(sigma)


# --- the other device -----------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("variant", VARIANTS)
def test_cuda(variant):
    """The same steps, the error on the device, and a model that was moved after construction."""
    ends = []
    for device in ("cpu", "cuda"):
        model, optimizer = make(variant)
        model.to(device)
        train(model, optimizer, [features.to(device) for features in batches([4] * 6)])
        assert all(
            optimizer.mechanism.hidden.error(i).device.type == device
            for i in range(len(optimizer.params))
        )
        ends.append((flat(model.parameters()), error_of(optimizer)))
    np.testing.assert_allclose(ends[0][0], ends[1][0], atol=1e-10)
    np.testing.assert_allclose(ends[0][1], ends[1][1], atol=1e-10)


def test_memory_is_two_buffers():
    """Beside what DPOptimizer keeps: the error, and while a batch is open the rest."""
    model, optimizer = make()
    optimizer.signal_skip_step()
    train(model, optimizer, batches([4]))
    count = sum(p.numel() for p in model.parameters())

    def held():
        hidden = optimizer.mechanism.hidden
        tensors = [t for t in hidden._errors + hidden._rests if t is not None]
        return sum(t.numel() for t in tensors)

    assert held() == count
    train(model, optimizer, batches([4]))
    assert held() == count
    optimizer.signal_skip_step()
    train(model, optimizer, batches([4]))
    assert held() == 2 * count
