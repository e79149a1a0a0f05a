"""Every Opacus optimizer through every misuse of misuse.py."""

import contextlib
import copy
import functools
import pickle
import warnings

import attrs
import misuse
import pytest
import torch
from misuse import BATCH, RECORDS, Trial, nothing
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hidden_state_accountants import LossGeometry
from hidden_state_adapters.opacus import (
    BlockCoordinateOptimizer,
    DiceSGD,
    HiddenStatePrivacyEngine,
)

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

FEATURES, CLASSES = 3, 2
# Softmax cross-entropy on features of norm 1 with a bias: sqrt(2) * sqrt(2).
BOUND = 2.0001


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(FEATURES))

    def forward(self, features):
        if torch.is_grad_enabled():  # in eval() mode, too
            self.seen += features.detach().sum(dim=0)
        return features


class Mixes(nn.Module):
    """Computes with its whole batch, in eval() mode, too, where no validator looks."""

    def __init__(self, function):
        super().__init__()
        self.function = function
        self.eval()

    def forward(self, features):
        return self.function(features)


LAYERS = {
    "": nn.Identity,
    "statistics": lambda: Mixes(lambda x: nn.functional.batch_norm(x, None, None, training=True)),
    "largest": lambda: Mixes(lambda x: x / x.norm(dim=1).max()),
    "guard": lambda: Mixes(lambda x: x / (x.norm(dim=1).max() / 3).clamp(min=1.0)),
    "batch_norm": lambda: nn.BatchNorm1d(FEATURES, affine=False, track_running_stats=False),
    "counts": Counts,
}


class Model(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = LAYERS[layer]()
        self.backbone = nn.Linear(FEATURES, FEATURES, bias=False).requires_grad_(False)
        nn.init.eye_(self.backbone.weight)
        self.register_buffer("shift", torch.zeros(FEATURES))
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, features):
        return self.head(self.backbone(self.layer(features)) + self.shift)


def data():
    features = torch.randn(RECORDS, FEATURES, generator=torch.Generator().manual_seed(0))
    return TensorDataset(nn.functional.normalize(features), torch.arange(RECORDS) % CLASSES)


# Settings by the names of the table.
ATTRIBUTES = {
    "clip_norm": "max_grad_norm",
    "divisor": "expected_batch_size",
    "error_clip_norm": "error_max_grad_norm",
}
IN_GROUPS = {
    "learning_rate": "lr",
    "momentum": "momentum",
    "weight_decay": "weight_decay",
    "maximize": "maximize",
}


@attrs.define(slots=False)
class OpacusTrial(Trial):
    """A run on the engine.

    Attributes:
        layer: Before the head.
        base: Makes the inner optimizer from the head and the learning rate.
        start, records, has_bound: See `Trial`.
        arguments: Further arguments of make_private.
        takes_closure: Whether a step asks for the gradients of every block.
        seed: Of the noise, where two runs need the same; None for noise that nobody knows.
    """

    layer: str
    base: object
    start: dict
    arguments: dict
    records: frozenset = frozenset()
    has_bound: bool = True
    takes_closure: bool = False
    is_computed: bool = False
    is_composed: bool = False
    seed: int | None = None

    def __attrs_post_init__(self):
        torch.manual_seed(0)
        self.model, self.criterion = Model(self.layer), nn.CrossEntropyLoss()
        self.engine = HiddenStatePrivacyEngine()
        self.generator = None
        if self.seed is not None:
            self.generator = torch.Generator().manual_seed(self.seed)
        self.private, self.optimizer, self.loader = self.made_private(self.engine)

    def made_private(self, engine, module=None, order="cyclic"):
        optimizer = self.base(self.model.head, self.start["learning_rate"])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Opacus: secure mode is off
            return engine.make_private(
                module=module or self.model,
                optimizer=optimizer,
                data_loader=DataLoader(data(), batch_size=BATCH),
                noise_multiplier=self.start["noise_multiplier"],
                max_grad_norm=self.start["clip_norm"],
                batch_order=order,
                criterion=self.criterion,
                noise_generator=self.generator,
                **self.arguments,
            )

    # The loop

    def epoch(self, *, at=1, between=nothing, before=nothing, after=nothing, scale=1.0):
        for index, batch in enumerate(self.loader):
            if index == at:
                between()
                self.step(batch, before, after, scale)
            else:
                self.step(batch)

    def batches(self):
        return iter(self.loader)

    def other_batches(self):
        return iter(DataLoader(self.loader.dataset, batch_size=BATCH))

    def step(self, batch, before=nothing, after=nothing, scale=1.0):
        features, labels = batch
        features = features.to(self.model.head.weight.dtype)

        def backward():
            self.optimizer.zero_grad()
            before()
            (scale * self.criterion(self.private(features), labels)).backward()
            after()

        if self.takes_closure:
            self.optimizer.step(backward)
        else:
            backward()
            self.optimizer.step()

    def rows(self, batch, index):
        return [part[list(index)] for part in batch]

    def mapped(self, batch):
        features, labels = batch
        return features / (1 + features.abs().max()), labels

    def write_inputs(self, batch):
        batch[0].lerp_(batch[0].flip(0), 0.1)

    def write_targets(self, batch):
        batch[1].copy_(batch[1].flip(0))

    def evaluate(self):
        with torch.no_grad():
            self.private(self.loader.dataset.tensors[0])

    # The state

    def weights(self):
        return [p.detach().clone() for p in self.model.head.parameters()]

    def set_weights(self, weights):
        for p, value in zip(self.model.head.parameters(), weights, strict=True):
            p.data.copy_(value)

    @contextlib.contextmanager
    def pass_with_other_weights(self):
        if "grad_sample_mode" in self.arguments:
            raise NotImplementedError("the hooks of Opacus know the parameters of the model only")
        private = self.private
        own = {name: p + 0.1 for name, p in private.named_parameters() if p.requires_grad}
        self.private = functools.partial(torch.func.functional_call, private, own)
        try:
            yield
        finally:
            self.private = private

    def hook_the_head(self):
        self.model.head.register_forward_pre_hook(
            lambda head, args: (args[0] / (1 + args[0].abs().max()),)
        )

    def frozen(self):
        return self.model.backbone.weight.detach().clone()

    def write_frozen(self, value):
        with torch.no_grad():
            self.model.backbone.weight.copy_(value)

    def write_frozen_unseen(self, value):
        self.model.backbone.weight.data.copy_(value)

    def write_buffer(self):
        self.model.shift += 0.1

    def freeze(self):
        self.model.head.bias.requires_grad_(False)

    def unfreeze(self):
        self.model.backbone.weight.requires_grad_(True)

    def halve_the_precision(self):
        self.model.to(torch.bfloat16)

    def coarse_arithmetic(self):
        return torch.autocast("cpu", dtype=torch.bfloat16)

    # The optimizer

    def set(self, name, value):
        if name in IN_GROUPS:
            for group in self.optimizer.param_groups:
                group[IN_GROUPS[name]] = value
        else:
            setattr(self.optimizer, ATTRIBUTES.get(name, name), value)

    def get(self, name):
        group = self.optimizer.param_groups[0]
        own = getattr(self.optimizer, ATTRIBUTES.get(name, name), None)
        value = group.get(IN_GROUPS[name]) if name in IN_GROUPS else own
        is_absent = value is None and name not in ("generator", "step_hook", "grad_scale")
        if is_absent or (name == "weight_decay" and not value):
            raise NotImplementedError(f"has no {name}")
        return value

    def seed_the_program(self):
        torch.manual_seed(4)

    def copy(self):
        copy.deepcopy(self.optimizer)

    def pickle(self):
        pickle.dumps(self.optimizer)

    def unused_gradients(self):
        features, labels = (part[:BATCH] for part in self.loader.dataset.tensors)
        self.criterion(self.private(features), labels).backward()

    def change_update(self):
        if self.takes_closure:
            raise NotImplementedError("the sum is made after the closure")
        for p in self.optimizer.params:
            p.summed_grad = torch.full_like(p, 100.0)

    def apply_again(self):
        if self.takes_closure:
            raise NotImplementedError("no gradient is left")
        self.optimizer.original_optimizer.step()

    def hook_on_the_update(self):
        self.optimizer.original_optimizer.register_step_pre_hook(lambda *_: None)

    def add_a_parameter(self):
        self.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})

    def replace_inner_optimizer(self):
        inner = self.base(self.model.head, self.start["learning_rate"])
        self.optimizer.original_optimizer = inner

    @contextlib.contextmanager
    def interrupted_update(self):
        is_plain = self.is_computed and not {"optimizer_class", "mechanism"} & self.arguments.keys()
        if self.takes_closure or is_plain:
            raise NotImplementedError("the step calls no inner optimizer")

        def interrupt(*args, **kwargs):
            raise KeyboardInterrupt

        self.optimizer.original_optimizer.step = interrupt
        yield
        del self.optimizer.original_optimizer.step

    def account_again(self):
        self.made_private(HiddenStatePrivacyEngine())

    def begin_with_a_convex_loss_of_two_layers(self):
        if self.is_composed or "mechanism" in self.arguments:
            raise NotImplementedError("convexity is of no use")
        self.model.backbone.requires_grad_(True)
        convex = {"loss_geometry": LossGeometry.convex(1.0), "feature_norm": None}
        self.arguments = {**self.arguments, **convex}
        model = self.model  # all of it in one group, and in one block
        self.base = lambda head, rate: torch.optim.SGD(model.parameters(), lr=rate)
        self.engine = HiddenStatePrivacyEngine()
        self.private, self.optimizer, self.loader = self.made_private(self.engine)

    def copy_to_another_engine(self):
        model = getattr(self.private, "_module", self.private)
        self.model, self.engine = copy.deepcopy(model), HiddenStatePrivacyEngine()
        self.private, self.optimizer, self.loader = self.made_private(self.engine)

    def begin_under_add_or_remove(self):
        self.engine = HiddenStatePrivacyEngine(neighboring_relation="add_or_remove_one")
        self.private, self.optimizer, self.loader = self.made_private(self.engine, order="poisson")

    def start_another_run(self):
        self.made_private(self.engine, self.private)

    # The account

    def get_epsilon(self):
        return self.engine.get_epsilon(1e-5)

    def event(self):
        return self.engine.privacy_event

    def recorded(self, setting):
        is_sgd = type(self.optimizer.original_optimizer) is torch.optim.SGD
        return None if setting in IN_GROUPS and not is_sgd else super().recorded(setting)

    def release(self):
        self.engine.release()

    def questions(self):
        return [
            *super().questions(),
            lambda: self.engine.report(1e-5),
            lambda: self.engine.compare(1e-5),
            self.start_another_run,
        ]


def one_group(kind, **options):
    return lambda head, rate: kind(head.parameters(), lr=rate, **options)


def a_group_for_each(head, rate):
    return torch.optim.SGD([{"params": [p]} for p in head.parameters()], lr=rate)


def dice(base, **arguments):
    return functools.partial(
        OpacusTrial,
        base=one_group(base),
        start={"learning_rate": 0.3, "noise_multiplier": 20.0, "clip_norm": 0.1},
        arguments={
            "mechanism": DiceSGD(error_max_grad_norm=0.02, gradient_bound=BOUND),
            **arguments,
        },
        is_computed="feature_norm" in arguments,
        records={"learning_rate", "momentum", "maximize", "weight_decay"},
    )


HOOKS = {"grad_sample_mode": "hooks"}


def composed(base, arguments, **options):
    return functools.partial(
        OpacusTrial,
        base=one_group(base, **options),
        start={"learning_rate": 0.5, "noise_multiplier": 2.0, "clip_norm": 0.7, **options},
        arguments=arguments,
        is_composed=True,
        records=frozenset(IN_GROUPS) | {"noise_multiplier", "clip_norm"},
        has_bound=False,
    )


OPTIMIZERS = {
    "sgd": functools.partial(
        OpacusTrial,
        base=one_group(torch.optim.SGD, weight_decay=0.1),
        start={
            "learning_rate": 0.5,
            "noise_multiplier": 2.0,
            "clip_norm": 2.1,
            "weight_decay": 0.1,
        },
        arguments={"loss_geometry": "auto", "feature_norm": 1.0},
        records={"learning_rate", "noise_multiplier", "clip_norm", "weight_decay"},
        is_computed=True,
    ),
    "composed": composed(torch.optim.SGD, {}, weight_decay=0.1),
    "composed_adam": composed(torch.optim.Adam, HOOKS),
    "dice_sgd": dice(torch.optim.SGD),
    "dice_of_a_known_loss": dice(torch.optim.SGD, feature_norm=1.0),
    "dice_adam": dice(torch.optim.Adam, **HOOKS),
    "block_coordinate": functools.partial(
        OpacusTrial,
        base=a_group_for_each,
        start={"learning_rate": 0.2, "noise_multiplier": 2.0, "clip_norm": 0.7},
        arguments={"optimizer_class": BlockCoordinateOptimizer, **HOOKS},
        records={"noise_multiplier"},
        has_bound=False,
        takes_closure=True,
    ),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("case", misuse.cases("opacus"))
def test_misuse(case, optimizer):
    try:
        misuse.check("opacus", case, OPTIMIZERS[optimizer], honest_epochs=1)
    except NotImplementedError as error:
        pytest.skip(f"cannot be done here: {error}")
