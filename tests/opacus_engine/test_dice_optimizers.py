"""DiceSGD for Opacus: the steps of the paper, a hidden error, the event of what ran."""

import copy
import io
import math
import pickle

import attrs
import numpy as np
import pytest
import torch
from dice import adam_step, automatic_step, sgd_step
from dp_accounting import NeighboringRelation
from opacus import GradSampleModule, PrivacyEngine
from opacus.data_loader import DPDataLoader
from opacus.optimizers import DPOptimizer
from opacus.schedulers import ExponentialNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import DiceAdamOptimizer, DiceSGDOptimizer
from hidden_state_adapters.opacus.dice_state import clip_factors, joint_norms, smallest_norm

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

RATE, DIVISOR, CLIP, ERROR_CLIP = 0.3, 4, 0.5, 0.2
OPTIMIZERS = {
    "sgd": (DiceSGDOptimizer, torch.optim.SGD, {}),
    "adam": (DiceAdamOptimizer, torch.optim.Adam, {}),
    "automatic": (DiceSGDOptimizer, torch.optim.SGD, {"automatic": True}),
}
VARIANTS = list(OPTIMIZERS)


def layers(dtype=torch.float64, reduction="mean"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    return GradSampleModule(model, loss_reduction=reduction)


def make(variant="sgd", model=None, base_options=None, **options):
    model = layers() if model is None else model
    cls, base, extra = OPTIMIZERS[variant]
    inner = base(model.parameters(), **{"lr": RATE, **(base_options or {})})
    arguments = {
        "noise_multiplier": 0.0,
        "max_grad_norm": CLIP,
        "error_max_grad_norm": CLIP if variant == "automatic" else ERROR_CLIP,
        "expected_batch_size": DIVISOR,
    }
    return model, cls(inner, **(arguments | extra | options))


def backward(model, features, scale=3.0):
    outputs = model(features)
    (scale * (outputs**2).sum(dim=1)).mean().backward() if len(features) else (
        scale * (outputs**2).sum()
    ).backward()


def batches(sizes, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(size, 3, generator=generator, dtype=dtype) for size in sizes]


def flat(tensors):
    return torch.cat([t.detach().reshape(-1) for t in tensors]).cpu().numpy().astype(float)


def per_example(model):
    samples = [
        p.grad_sample.reshape(len(p.grad_sample), math.prod(p.shape)) for p in model.parameters()
    ]
    return torch.cat(samples, dim=1).cpu().numpy().astype(float)


def error_of(optimizer):
    return flat(optimizer.run_state_dict(include_private_state=True)["private"]["error"])


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


def train(model, optimizer, data):
    for features in data:
        optimizer.zero_grad()
        backward(model, features)
        optimizer.step()


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


# --- the error stays here -------------------------------------------------------------------------

MARK = 777.25  # the error of the one record below: 1024 - C, a value that stands out


def marked(base_options=None):
    """An optimizer whose error is MARK in one coordinate."""
    model = GradSampleModule(nn.Linear(1, 1, bias=False).double())
    optimizer = DiceSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0, **(base_options or {})), noise_multiplier=1.0,
        max_grad_norm=1.0, expected_batch_size=1, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    model(torch.full((1, 1), MARK + 1, dtype=torch.float64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    assert error_of(optimizer) == [MARK]
    return model, optimizer


def everything_in(value):
    """All numbers that can be reached from containers and tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach().reshape(-1).tolist()
    if isinstance(value, dict):
        return [n for v in value.values() for n in everything_in(v)]
    if isinstance(value, list | tuple):
        return [n for v in value for n in everything_in(v)]
    return [value] if isinstance(value, float) else []


def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


NEEDLE = np.float64(MARK).tobytes()


def test_the_error_is_in_no_state():
    model, optimizer = marked({"momentum": 0.9})
    states = [optimizer.state_dict(), dict(optimizer.state), model.state_dict(),
              optimizer.defaults, optimizer.param_groups]  # fmt: skip
    assert MARK not in everything_in(states)
    assert NEEDLE not in saved(states)
    assert NEEDLE in saved(optimizer.run_state_dict(include_private_state=True))
    model_and_attributes = [p.__dict__ for p in model.parameters()]
    assert MARK not in everything_in(model_and_attributes)


def test_the_error_is_in_no_text():
    _, optimizer = marked()
    report = optimizer.report(1e-5, dataset_size=1, batch_order="full")
    for text in (repr(optimizer), str(optimizer), str(vars(optimizer)), report):
        assert "777" not in text


@pytest.mark.parametrize("copier", [pickle.dumps, copy.copy, copy.deepcopy, saved])
def test_optimizer_and_error_cannot_be_copied(copier):
    _, optimizer = marked()
    for value in (optimizer, vars(optimizer)["_hidden"]):
        with pytest.raises(hsa.UnsupportedRunError, match="cannot be copied or pickled"):
            copier(value)


def test_the_error_is_in_no_checkpoint_of_opacus(tmp_path):
    model, optimizer = marked()
    engine = PrivacyEngine()
    engine.save_checkpoint(path=tmp_path / "c.pt", module=model, optimizer=optimizer)
    content = torch.load(tmp_path / "c.pt", weights_only=False)
    assert NEEDLE not in saved(content)
    assert MARK not in everything_in(content)


def test_a_model_that_is_saved_as_a_whole_lacks_the_error(tmp_path):
    model, _ = marked()
    assert NEEDLE not in saved(list(model._module.parameters()))
    assert NEEDLE not in saved(copy.deepcopy(model._module).state_dict())


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_goes_on_with_its_private_state(variant):
    data = batches([4] * 6)
    whole_model, whole = make(variant)
    train(whole_model, whole, data)
    model, optimizer = make(variant)
    train(model, optimizer, data[:3])
    state = torch.load(
        io.BytesIO(saved(optimizer.run_state_dict(include_private_state=True))), weights_only=True
    )
    base, weights = optimizer.state_dict(), model.state_dict()
    model, optimizer = make(variant)
    model.load_state_dict(weights)
    optimizer.load_state_dict(copy.deepcopy(base))
    optimizer.load_run_state_dict(state)
    train(model, optimizer, data[3:])
    np.testing.assert_array_equal(flat(model.parameters()), flat(whole_model.parameters()))
    np.testing.assert_array_equal(error_of(optimizer), error_of(whole))
    arguments = {"dataset_size": 8, "batch_order": "cyclic"}
    assert optimizer.privacy_event(**arguments) == whole.privacy_event(**arguments)


def test_the_private_state_has_to_be_asked_for():
    _, optimizer = marked()
    for arguments in ({}, {"include_private_state": False}, {"include_private_state": 1}):
        with pytest.raises(ValueError, match="Expected include_private_state=True"):
            optimizer.run_state_dict(**arguments)


def test_private_states_that_do_not_fit():
    model, optimizer = make()
    with pytest.raises(ValueError, match="no step yet"):
        optimizer.run_state_dict(include_private_state=True)
    train(model, optimizer, batches([4]))
    state = optimizer.run_state_dict(include_private_state=True)
    optimizer.signal_skip_step()
    train(model, optimizer, batches([4]))
    with pytest.raises(ValueError, match="a piece of one"):
        optimizer.run_state_dict(include_private_state=True)
    with pytest.raises(ValueError, match="without steps, got one with 1"):
        optimizer.load_run_state_dict(state)
    _, other = make(max_grad_norm=0.6)
    with pytest.raises(ValueError, match=r"max_grad_norm = 0.6, got 0.5"):
        other.load_run_state_dict(state)
    _, fresh = make()
    private = state["private"]
    for damaged, text in [
        ({}, "missing keys"),
        (state | {"schema": 9}, "schema 9"),
        (state | {"num_steps": 0}, "num_steps >= 1"),
        (state | {"private": private | {"error": private["error"][:-1]}}, "error of shapes"),
        (state | {"private": private | {"error": [e * math.nan for e in private["error"]]}},
         "not finite"),
        (state | {"private": private | {"most_rows": 1}}, "most_rows >= 4"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=text):
            fresh.load_run_state_dict(damaged)
    assert fresh.num_steps == 0
    fresh.load_run_state_dict(state)
    assert fresh.num_steps == 1


# --- the account ----------------------------------------------------------------------------------


def test_the_event_is_what_ran():
    model, optimizer = make(noise_multiplier=2.0)
    with pytest.raises(ValueError, match="at least one step"):
        optimizer.privacy_event(dataset_size=8, batch_order="cyclic")
    train(model, optimizer, batches([4] * 6))
    bound = 1e3
    event = optimizer.privacy_event(
        dataset_size=8, batch_order="cyclic", num_steps=6, gradient_bound=bound
    )
    assert event == hsa.DiceSgdDpEvent(
        noise_std=2.0 * CLIP / DIVISOR, clip_norm=CLIP, error_clip_norm=ERROR_CLIP,
        batch_size=DIVISOR, dataset_size=8, num_steps=6, batch_order="cyclic",
        gradient_bound=bound,
    )  # fmt: skip
    assert optimizer.privacy_event(dataset_size=8, batch_order="poisson").gradient_bound == math.inf
    _, automatic = make("automatic", noise_multiplier=2.0)
    assert automatic.automatic


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_steps": 5}, "num_steps = 6, the steps taken, got 5"),
        ({"gradient_bound": 1e-3}, "gradient_bound >= "),
    ],
)
def test_an_event_that_did_not_happen(arguments, text):
    model, optimizer = make(noise_multiplier=2.0)
    train(model, optimizer, batches([4] * 6))
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        optimizer.privacy_event(**{"dataset_size": 8, "batch_order": "cyclic", **arguments})


@pytest.mark.parametrize("sizes", [[4, 3], [3, 4], [4, 5], [4, 0]])
def test_batches_of_a_fixed_size_are_counted(sizes):
    model, optimizer = make(noise_multiplier=2.0)
    train(model, optimizer, batches(sizes))
    for order in ("cyclic", "reshuffled", "without_replacement"):
        with pytest.raises(hsa.UnsupportedRunError, match="Expected 4 rows in every"):
            optimizer.privacy_event(dataset_size=8, batch_order=order)
    assert optimizer.privacy_event(dataset_size=8, batch_order="poisson").num_steps == 2
    if max(sizes) > 4:
        with pytest.raises(hsa.UnsupportedRunError, match="at most dataset_size = 4 rows"):
            optimizer.privacy_event(dataset_size=4, batch_order="poisson")


def test_the_report_has_the_proven_epsilon_and_the_papers():
    model, optimizer = make(noise_multiplier=40.0, error_max_grad_norm=CLIP)
    train(model, optimizer, batches([4] * 6))
    arguments = {"dataset_size": 40, "batch_order": "poisson"}
    event = optimizer.privacy_event(**arguments)
    proven = hsa.DiceSgdAccountant().compose(event).get_epsilon(1e-5)
    claimed = hsa.DiceSgdAccountant(analysis="published").compose(event).get_epsilon(1e-5)
    report = optimizer.report(1e-5, **arguments)
    assert f"epsilon = {proven:.4f} at delta = 1e-05" in report
    assert f"would claim epsilon = {claimed:.4f}; do not use it" in report
    assert "theorem is false" in report
    assert "bound before clipping: none declared" in report
    cyclic = optimizer.report(
        1e-5, dataset_size=40, batch_order="cyclic", gradient_bound=1e3,
        neighboring_relation=NeighboringRelation.REPLACE_ONE,
    )  # fmt: skip
    assert "does not apply" in cyclic
    assert "bound before clipping: 1000" in cyclic
    with pytest.raises(hsa.UnsupportedRunError):
        optimizer.report(
            1e-5, dataset_size=40, batch_order="cyclic",
            neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE,
        )  # fmt: skip


def updates(gradients, batch, automatic):
    """The mean updates without noise of a run with constant gradients, and its event."""
    model = GradSampleModule(nn.Linear(gradients.shape[1], 1, bias=False).double())
    optimizer = DiceSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), noise_multiplier=1.0, max_grad_norm=CLIP,
        error_max_grad_norm=ERROR_CLIP, expected_batch_size=batch, automatic=automatic,
        generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    seen = []
    for _ in range(5):
        for rows in gradients.split(batch):
            optimizer.zero_grad()
            model(rows).mean().backward()
            optimizer.step()
            seen.append(flat([p.grad for p in model.parameters()]))
    return np.array(seen), optimizer


@pytest.mark.parametrize("automatic", [False, True])
@pytest.mark.parametrize("size", [0.1, 0.7, 3.0, 300.0])
def test_what_one_record_does_is_within_the_bound(size, automatic):
    """The same noise on neighbouring data sets: the squared differences of all updates together.

    The outlier is preceded by a batch that pulls the error the other way.
    """
    gradients = torch.zeros(6, 3, dtype=torch.float64)
    gradients[:2, 0], gradients[2, 0] = -size, size
    without = gradients.clone()
    without[2] = 0.0
    (first, optimizer), (second, _) = (updates(g, 2, automatic) for g in (gradients, without))
    event = optimizer.privacy_event(dataset_size=6, batch_order="cyclic", gradient_bound=size)
    allowed = hsa.DiceSgdAccountant().compose(event).guarantee.mu * event.noise_std
    shown = np.linalg.norm(first - second)
    assert 0.3 * allowed < shown <= allowed * (1 + 1e-9)


def test_a_poisson_loader_by_hand():
    """As in the docstring, with whatever sizes and empty batches it draws."""
    model, optimizer = make(
        noise_multiplier=1.0, expected_batch_size=2, model=layers(torch.float32)
    )
    data = TensorDataset(batches([20], torch.float32)[0])
    generator = torch.Generator().manual_seed(4)
    loader = DPDataLoader.from_data_loader(DataLoader(data, batch_size=2), generator=generator)
    sizes = []
    for _ in range(3):
        for (features,) in loader:
            optimizer.zero_grad()
            backward(model, features)
            optimizer.step()
            sizes.append(len(features))
    assert 0 in sizes
    event = optimizer.privacy_event(dataset_size=20, batch_order="poisson")
    assert event.num_steps == len(sizes) == 30
    assert event.sampling_probability == loader.sample_rate


def test_learning_rates_may_change():
    model, optimizer = make(noise_multiplier=2.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for features in batches([4] * 3):
        train(model, optimizer, [features])
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == RATE / 8
    assert optimizer.privacy_event(dataset_size=8, batch_order="poisson").num_steps == 3


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"noise_multiplier": -1.0}, ValueError, "noise_multiplier >= 0"),
        ({"noise_multiplier": math.nan}, ValueError, "noise_multiplier"),
        ({"noise_multiplier": "1"}, TypeError, "noise_multiplier"),
        ({"max_grad_norm": 0.0}, ValueError, "max_grad_norm > 0"),
        ({"max_grad_norm": math.inf}, ValueError, "max_grad_norm"),
        ({"max_grad_norm": [1.0] * 4}, hsa.UnsupportedRunError, "clipped as one vector"),
        ({"error_max_grad_norm": [1.0] * 4}, hsa.UnsupportedRunError, "error_max_grad_norm"),
        ({"error_max_grad_norm": 0.0}, ValueError, "error_max_grad_norm > 0"),
        ({"error_max_grad_norm": 1e-20, "model": torch.float32}, ValueError, "underflow"),
        ({"max_grad_norm": 1e-20, "model": torch.float32}, ValueError, "underflow"),
        ({"expected_batch_size": None}, TypeError, "expected_batch_size to be an integer"),
        ({"expected_batch_size": 2.0}, TypeError, "expected_batch_size to be an integer"),
        ({"expected_batch_size": 0}, ValueError, "expected_batch_size >= 1"),
        ({"automatic": 1}, TypeError, "automatic to be True or False"),
        ({"loss_reduction": "none"}, ValueError, "'mean' or 'sum'"),
        ({"generator": 3}, TypeError, "torch.Generator"),
        ({"secure_mode": None}, TypeError, "secure_mode"),
        ({"model": torch.bfloat16}, hsa.UnsupportedRunError, "float32 or float64"),
        ({"no_such_argument": 1}, TypeError, "no_such_argument"),
    ],
)
def test_impossible_arguments(arguments, error, text):
    dtype = arguments.pop("model", torch.float64)
    with pytest.raises(error, match=text):
        make(model=layers(dtype), **arguments)


@pytest.mark.parametrize(
    ("cls", "base", "text"),
    [
        (DiceSGDOptimizer, torch.optim.Adam, "torch.optim.SGD in DiceSGDOptimizer, got Adam"),
        (DiceAdamOptimizer, torch.optim.SGD, "torch.optim.Adam or torch.optim.AdamW"),
        (DiceSGDOptimizer, torch.optim.LBFGS, "got LBFGS"),
    ],
)
def test_other_optimizers(cls, base, text):
    inner = base(layers().parameters(), lr=0.1)
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        cls(inner, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4)


def test_an_optimizer_that_is_private_already():
    inner = make()[1]
    with pytest.raises(hsa.UnsupportedRunError, match="Pass its original_optimizer"):
        DiceSGDOptimizer(inner, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4)


def test_ghost_clipping():
    """Refused at the first step: only a backward pass tells the mode."""
    model = nn.Linear(3, 2)
    data = TensorDataset(torch.ones(8, 3), torch.zeros(8, dtype=torch.long))
    ghost, _, criterion, _ = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=nn.CrossEntropyLoss(), data_loader=DataLoader(data, batch_size=4),
        noise_multiplier=1.0, max_grad_norm=1.0, grad_sample_mode="ghost",
    )  # fmt: skip
    _, optimizer = make(model=ghost)
    before = flat(model.parameters())
    criterion(ghost(data.tensors[0]), data.tensors[1]).backward()
    with pytest.raises(hsa.UnsupportedRunError, match="second backward pass leaves only a sum"):
        optimizer.step()
    np.testing.assert_array_equal(flat(model.parameters()), before)
    with pytest.raises(hsa.UnsupportedRunError, match="ghost clipping"):
        make(model=ghost)


def test_the_step_hook_is_closed():
    """An accountant behind it would report the epsilon of DP-SGD, which is too small."""
    _, optimizer = make()
    for name in ("rdp", "prv", "hidden_state"):
        hook = PrivacyEngine(accountant=name).accountant.get_optimizer_hook_fn(sample_rate=0.1)
        with pytest.raises(hsa.UnsupportedRunError, match="leaves out what the error shows"):
            optimizer.attach_step_hook(hook)


def change_noise(model, optimizer):
    ExponentialNoise(optimizer, gamma=0.9).step()


def change(name, value):
    def apply(model, optimizer):
        setattr(optimizer, name, value)

    return apply


def add_group(model, optimizer):
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def freeze(model, optimizer):
    next(model.parameters()).requires_grad_(False)


def reseed(model, optimizer):
    optimizer.generator.manual_seed(3)


@pytest.mark.parametrize(
    ("tamper", "text"),
    [
        (change_noise, "step 2 uses noise_multiplier = "),
        (change("max_grad_norm", 0.1), "step 2 uses max_grad_norm = 0.1, expected 0.5"),
        (change("error_max_grad_norm", 0.1), "step 2 uses error_max_grad_norm"),
        (change("expected_batch_size", 5), "step 2 uses expected_batch_size"),
        (change("automatic", True), "step 2 uses automatic"),
        (change("loss_reduction", "sum"), "step 2 uses loss_reduction"),
        (change("step_hook", print), "step_hook"),
        (change("original_optimizer", None), "original_optimizer|param_groups"),
        (change("grad_scale", 1.0), "GradScaler"),
        (add_group, "step 2 trains 5 parameters, expected the 4"),
        (freeze, "step 2 trains 3 parameters, expected the 4"),
        (reseed, "step 2: the noise generator is in a state"),
    ],
)
def test_runs_that_are_not_covered(tamper, text):
    model, optimizer = make(noise_multiplier=1.0, generator=torch.Generator().manual_seed(3))
    first, second = batches([4, 4])
    train(model, optimizer, [first])
    before = flat(model.parameters())
    optimizer.zero_grad()
    backward(model, second)
    tamper(model, optimizer)
    with pytest.raises((hsa.UnsupportedRunError, AttributeError), match=text):
        optimizer.step()
    np.testing.assert_array_equal(flat(list(model.parameters())[:4]), before)
    assert optimizer.num_steps == 1


def test_a_frozen_parameter_with_an_old_gradient():
    model_frozen = layers()
    frozen = next(model_frozen.parameters())
    frozen.requires_grad_(False)
    inner = torch.optim.SGD(model_frozen.parameters(), lr=0.1)
    optimizer = DiceSGDOptimizer(
        inner, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4
    )
    backward(model_frozen, batches([4])[0])
    frozen.grad = torch.ones_like(frozen)
    with pytest.raises(hsa.UnsupportedRunError, match="would move a frozen parameter"):
        optimizer.step()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gradients_that_no_clip_bounds(value):
    model, optimizer = make(noise_multiplier=1.0)
    train(model, optimizer, batches([4]))
    optimizer.zero_grad()
    features = batches([4])[0]
    backward(model, features)
    next(model.parameters()).grad_sample[2, 0, 0] = value
    before = flat(model.parameters())
    with pytest.raises(hsa.UnsupportedRunError, match="step 2 has a per-example gradient whose"):
        optimizer.step()
    np.testing.assert_array_equal(flat(model.parameters()), before)
    optimizer.zero_grad()
    backward(model, features)
    with pytest.raises(hsa.UnsupportedRunError, match="An earlier step of this run was refused"):
        optimizer.step()
    with pytest.raises(hsa.UnsupportedRunError, match="may depend on the records"):
        optimizer.privacy_event(dataset_size=8, batch_order="poisson")
    with pytest.raises(hsa.UnsupportedRunError, match="may depend on the records"):
        optimizer.run_state_dict(include_private_state=True)


def test_an_error_that_overflows():
    """An infinite error has no direction to clip."""
    model = GradSampleModule(nn.Linear(1, 1, bias=False))
    optimizer = DiceSGDOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.0), noise_multiplier=1.0, max_grad_norm=1.0,
        expected_batch_size=1,
    )  # fmt: skip
    for raises in (False, True):
        optimizer.zero_grad()
        model(torch.full((4, 1), 3e38)).mean().backward()
        if raises:
            with pytest.raises(hsa.UnsupportedRunError, match="step 2: the error overflowed"):
                optimizer.step()
        else:
            optimizer.step()


def test_gradients_of_two_passes():
    model, optimizer = make()
    for features in batches([4, 4]):
        backward(model, features)
    with pytest.raises(hsa.UnsupportedRunError, match="gradients of 2 batches"):
        optimizer.step()


def test_gradients_that_were_used_before():
    model, optimizer = make()
    train(model, optimizer, batches([4]))
    with pytest.raises(hsa.UnsupportedRunError, match=r"Call optimizer.zero_grad\(\)"):
        optimizer.step()


def drop(p):
    p.summed_grad = None


def double(p):
    p.summed_grad.mul_(2)


def swap(p):
    p.summed_grad = p.summed_grad.clone()


@pytest.mark.parametrize("tamper", [drop, double, swap])
def test_a_piece_whose_sum_was_changed(tamper):
    """The error would keep what the sum has lost."""
    model, optimizer = make()
    optimizer.signal_skip_step()
    train(model, optimizer, batches([4]))
    for p in model.parameters():
        tamper(p)
    with pytest.raises(hsa.UnsupportedRunError, match="does not come from the pieces"):
        train(model, optimizer, batches([4]))


def test_no_gradients():
    _, optimizer = make()
    with pytest.raises(hsa.UnsupportedRunError, match="got no per-example gradients"):
        optimizer.step()


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
            optimizer._hidden.error(i).device.type == device for i in range(len(optimizer.params))
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
        hidden = optimizer._hidden
        tensors = [t for t in hidden._errors + hidden._rests if t is not None]
        return sum(t.numel() for t in tensors)

    assert held() == count
    train(model, optimizer, batches([4]))
    assert held() == count
    optimizer.signal_skip_step()
    train(model, optimizer, batches([4]))
    assert held() == 2 * count


def test_events_of_all_variants_are_accounted():
    """Epsilon is that of the accountant and larger than that of DP-SGD at the same noise."""
    for variant in VARIANTS:
        model, optimizer = make(variant, noise_multiplier=20.0)
        train(model, optimizer, batches([4] * 6))
        event = optimizer.privacy_event(dataset_size=40, batch_order="poisson")
        assert event.automatic is (variant == "automatic")
        plain = attrs.evolve(event, gradient_bound=CLIP, automatic=False)
        epsilon, dp_sgd = (
            hsa.DiceSgdAccountant().compose(e).get_epsilon(1e-5) for e in (event, plain)
        )
        assert dp_sgd < epsilon < math.inf
