"""What Opacus lets a loop do, and no bound on hidden iterates would: accounted by composition."""

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from hidden_state_accountants import UnsupportedRunError
from hidden_state_adapters.opacus import DiceSGD, HiddenStatePrivacyEngine

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DELTA = 1e-5


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


# --- layers that are frozen in the middle of a run ------------------------------------------------


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("module", [layers, lambda: nn.Linear(5, 3)], ids=["layers", "head"])
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
