"""Opacus' own tests with HiddenStatePrivacyEngine in place of PrivacyEngine.

    python tests/upstream/run_opacus_suite.py [arguments of pytest, e.g. -k TiedWeights]

The tests ship with Opacus and say `from opacus import PrivacyEngine`: the name is rebound before
they are imported. What this engine does otherwise is listed below with the reason; such a test must
fail, and with this very error. The last line counts the tests that made a private optimizer here.
"""

import os
import re
import sys
import types
import warnings

import hypothesis
import opacus
import pytest
import torch
from torch import nn
from torch.utils.data import RandomSampler

from hidden_state_adapters.opacus import Batches, HiddenStatePrivacyEngine

MODULES = (
    "privacy_engine",
    "privacy_engine_validation",
    "batch_memory_manager",
    "gradient_accumulation",
    "randomness",
    "accounting_noise_multiplier",
    "mixed_precision",
    "schedulers/grad_clip_scheduler",
    "schedulers/noise_scheduler",
)
# Of Opacus' other test files none calls the engine: they test its accountants, gradient samplers,
# ghost clipping, validators and Poisson loaders by themselves.

# Name of a test, after the beginning of its class's name: (what the error says, the reason).
EXPECTED_TO_FAIL = {
    ("test_noise_level",): (
        "the parameters were changed outside the private optimizer",
        "the test zeroes the parameters after make_private, which is noticed",
    ),
    ("test_checkpoints",): (
        "The checkpoint is of another run: expected noise_multiplier = 2.0, got 0.0",
        "the test loads into a run with another noise multiplier: refused, the field is named",
    ),
    ("PrivacyEngineText", "test_make_private_with_epsilon"): (
        "rows",
        "the test leaves out batch_first=False: gradients per position, not per record; noticed",
    ),
    ("test_model_validator",): (
        "Expected no batch statistics",
        "batch norm is refused here first, with another type of error",
    ),
    ("test_privacy_engine_no_poisson_accumulation",): (
        "training passes through the model, expected 1",
        "accumulation over batches is refused at the step",
    ),
    ("test_privacy_engine_poisson_accumulation",): (
        "ValueError not raised",
        "accumulation over batches is refused at the step, not already in backward()",
    ),
    ("PrivacyEngineSecureModeTest", "test_global_seed"): (
        "False is not true",
        "the test seeds after make_private: torch's seed does not reach a secret order",
    ),
    ("test_privacy_accounting_with_adaclip_e2e",): (
        'Expected clipping = "flat" or "per_layer", got "adaptive"',
        "adaptive clipping is refused: its noise does not pay for the counts that it publishes",
    ),
}


class Engine(HiddenStatePrivacyEngine):
    """Speaks Opacus' arguments; order and noise follow torch's seed, as the tests expect."""

    runs = 0

    def make_private(self, **arguments):
        return self._made(super().make_private, **arguments)

    def make_private_with_epsilon(self, **arguments):
        return self._made(super().make_private_with_epsilon, **arguments)

    def _made(self, make, *, poisson_sampling=True, **arguments):
        order = _order(poisson_sampling, **arguments)
        noise = {}
        if not self.secure_mode:
            seed = int(torch.randint(2**31, ()))
            noise = {"noise_generator": torch.Generator().manual_seed(seed)}
        private = make(**order, **noise | arguments)
        Engine.runs += 1
        return private


def _order(poisson_sampling, *, data_loader, grad_sample_mode="hooks", **arguments):
    shuffles = isinstance(data_loader.sampler, RandomSampler)
    is_ragged = len(data_loader.dataset) % data_loader.batch_size
    if not (poisson_sampling or shuffles or is_ragged):
        return {"batch_order": "cyclic"}
    generator = data_loader.generator
    seed = torch.initial_seed() if generator is None else generator.initial_seed()
    order = "poisson" if poisson_sampling else "without_replacement" if is_ragged else "reshuffled"
    if grad_sample_mode == "ew" and poisson_sampling:
        order = "without_replacement"  # expanded weights stop at an empty batch
    return {"batch_order": Batches(order, seed=seed, seed_is_secret=True)}


class FakeData(torch.utils.data.Dataset):
    """torchvision's FakeData: random images, always the same for an index."""

    def __init__(self, size, image_size, num_classes, transform=None):
        self._size, self._shape, self._classes = size, image_size, num_classes

    def __len__(self):
        return self._size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = (torch.rand(self._shape, generator=generator) - 0.1307) / 0.3081
        return image, int(torch.randint(self._classes, (), generator=generator))


class WithBatchNorm(nn.Module):
    """So much of torchvision's models as the tests look at: batch norm and a linear classifier."""

    def __init__(self, weights=None):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.classifier = nn.Linear(4, 10)

    def forward(self, images):
        return self.classifier(self.features(images).mean(dim=(2, 3)))


def stand_in_for_torchvision():
    """So much of it as the tests use; its wheels go with CUDA builds of torch only."""
    datasets = types.ModuleType("torchvision.datasets")
    datasets.FakeData = FakeData
    torchvision = types.ModuleType("torchvision")
    torchvision.datasets = datasets
    torchvision.transforms = types.SimpleNamespace(
        Compose=list, ToTensor=lambda: None, Normalize=lambda mean, std: None
    )
    torchvision.models = types.SimpleNamespace(resnet18=WithBatchNorm, densenet121=WithBatchNorm)
    sys.modules.update({"torchvision": torchvision, "torchvision.datasets": datasets})


class Expectations:
    """Compares failures with the list above, and counts the tests that used the engine."""

    def __init__(self):
        self.passed, self.used = {}, False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        before = Engine.runs
        try:
            return (yield)
        finally:
            self.used = Engine.runs > before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if call.when != "call" or report.skipped:
            return report
        expected = [
            rule
            for parts, rule in EXPECTED_TO_FAIL.items()
            if parts[-1] == item.originalname
            and all(item.cls.__name__.startswith(name) for name in parts[:-1])
        ]
        if report.passed and not expected:
            self.passed[item.nodeid] = self.used  # subtests come by before their test
        for text, reason in expected:
            if report.passed:
                report.outcome, report.longrepr = "failed", f"It passed, but was listed: {reason}"
            elif re.search(text, str(call.excinfo.value), re.DOTALL):
                report.outcome, report.wasxfail = "skipped", reason
        return report

    def pytest_terminal_summary(self, terminalreporter):
        with_engine = sum(self.passed.values())
        without = len(self.passed) - with_engine
        terminalreporter.write_line(
            f"{with_engine} tests passed with a private optimizer of this engine, {without} passed "
            "that make none."
        )


def main():
    opacus.PrivacyEngine = Engine
    stand_in_for_torchvision()
    hypothesis.settings.register_profile("few", max_examples=4, derandomize=True, database=None)
    hypothesis.settings.load_profile("few")
    warnings.simplefilter("ignore")
    folder = os.path.join(os.path.dirname(opacus.__file__), "tests")
    files = [os.path.join(folder, f"{name}_test.py") for name in MODULES]
    options = ["-c", os.devnull, "--rootdir", folder, "-p", "no:cacheprovider", "-q", "-rfExX"]
    return pytest.main([*options, *sys.argv[1:], *files], plugins=[Expectations()])


if __name__ == "__main__":
    sys.exit(main())
