"""Loops of others: Lightning's Trainer, accelerate, transformers' Trainer.

The libraries are not among what the package installs. Where they are missing their tests are
skipped; what their loops do differently from a plain one is imitated here, and always tested.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import hidden_state_accountants as hsa

pytestmark = pytest.mark.filterwarnings("ignore")

DELTA = 1e-5
NOT_INSTALLED = "is not among what this package installs"
lightning = functools.partial(pytest.importorskip, "lightning", reason=f"Lightning {NOT_INSTALLED}")
accelerate = functools.partial(
    pytest.importorskip, "accelerate", reason=f"accelerate {NOT_INSTALLED}"
)
transformers = functools.partial(
    pytest.importorskip, "transformers", reason=f"transformers {NOT_INSTALLED}"
)


def fetched_ahead(loader):
    """As Lightning's fetcher for loaders without a length, and accelerate's loaders."""
    batches = iter(loader)
    batch = next(batches)
    for ahead in batches:
        yield batch
        batch = ahead
    yield batch


def trained(run, steps=12):
    event = run.engine.privacy_event
    assert event == hsa.LastIterateDpEvent(
        noise_multiplier=2.0, learning_rate=0.5, clip_norm=2.1, batch_size=10, dataset_size=60,
        num_steps=steps, batch_order=event.batch_order, weight_decay=0.1,
        loss=hsa.LossGeometry.softmax_cross_entropy(1.0, bias=True),
    )  # fmt: skip
    assert 0 < run.engine.get_epsilon(DELTA) < float("inf")


# Imitations.


@pytest.mark.parametrize("order", ["cyclic", "poisson"])
def test_a_closure_as_lightning_passes_it(make_run, order):
    """Forward pass, then zero_grad(), then backward(), all inside of step()."""
    run = make_run(batch_order=order, criterion=F.cross_entropy)
    run.model.train()
    for _ in range(2):
        for features, labels in fetched_ahead(run.loader):
            called = []

            def closure(features=features, labels=labels, called=called):
                loss = F.cross_entropy(run.model(features), labels) / 1
                run.optimizer.zero_grad()
                loss.backward()
                called.append(loss.detach())
                return loss

            run.optimizer.step(closure=closure)
            assert len(called) == 1
    trained(run)


@pytest.mark.parametrize("mode", ["hooks", "functorch"])
def test_gradients_cleared_on_the_model(make_run, mode):
    """transformers' Trainer calls model.zero_grad(), which knows no sums of clipped gradients."""
    arguments = {"noise_multiplier": 0.0, "grad_sample_mode": mode}
    run, plain = make_run(**arguments), make_run(**arguments)
    for features, labels in run.loader:
        run.model.zero_grad()
        run.criterion(run.model(features), labels).backward()
        run.optimizer.step()
    plain.epoch()
    for a, b in zip(run.plain_model.parameters(), plain.plain_model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert run.engine.privacy_event == plain.engine.privacy_event


def test_a_loader_that_says_it_is_prepared(make_run):
    """accelerate returns it unchanged; in place of it, it would build one around the sampler."""
    run = make_run()
    assert run.loader._is_accelerate_prepared
    rebuilt = torch.utils.data.DataLoader(
        run.loader.dataset, batch_sampler=run.loader.batch_sampler
    )
    with pytest.raises(hsa.UnsupportedRunError, match="another loader was built around"):
        run.epoch(fetched_ahead(rebuilt))


# The libraries.


def module_of(run):
    class Module(lightning().LightningModule):
        def __init__(self):
            super().__init__()
            self.model = run.model

        def training_step(self, batch, index):
            features, labels = batch
            return F.cross_entropy(self.model(features), labels)

        def configure_optimizers(self):
            return run.optimizer

    return Module()


def fit(run, loader=None, **options):
    trainer = lightning().Trainer(
        max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **options,
    )  # fmt: skip
    trainer.fit(module_of(run), run.loader if loader is None else loader)


class WithoutLength:
    """Makes Lightning fetch one batch ahead."""

    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)


@pytest.mark.parametrize("order", ["cyclic", "poisson"])
@pytest.mark.parametrize("wrap", [lambda loader: loader, WithoutLength])
def test_lightning(make_run, order, wrap):
    lightning()
    run = make_run(batch_order=order, criterion=F.cross_entropy)
    fit(run, wrap(run.loader))
    trained(run)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"accumulate_grad_batches": 2}, "gradient accumulation|training passes"),
        ({"limit_train_batches": 4}, "step 5 used batch 0, expected batch 4"),
    ],
)
def test_lightning_is_refused(make_run, options, text):
    lightning()
    run = make_run(criterion=F.cross_entropy)
    with pytest.raises(hsa.UnsupportedRunError, match=text):
        fit(run, **options)


def test_accelerate(make_run):
    accelerator = accelerate().Accelerator(cpu=True)
    run = make_run(batch_order="poisson", criterion=F.cross_entropy)
    model, optimizer, loader = accelerator.prepare(run.model, run.optimizer, run.loader)
    assert loader is run.loader
    for _ in range(2):
        for features, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(F.cross_entropy(model(features), labels))
            optimizer.step()
    trained(run)


class Sentences(Dataset):
    def __init__(self):
        self.ids = torch.randint(0, 50, (60, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return 60

    def __getitem__(self, index):
        mask = torch.ones(8, dtype=torch.long)
        return {"input_ids": self.ids[index], "attention_mask": mask, "labels": index % 3}


@pytest.mark.parametrize("has_trainer", [False, True])
def test_transformers(make_run, has_trainer, tmp_path):
    """A sequence classifier with random weights and a frozen encoder; dropout before the head."""
    library = transformers()
    config = library.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, num_labels=3, max_position_embeddings=16,
    )  # fmt: skip
    model = library.BertForSequenceClassification(config)
    model.bert.requires_grad_(False)
    trainable = [p for p in model.parameters() if p.requires_grad]
    run = make_run(
        model=model, optimizer=torch.optim.SGD(trainable, lr=0.01), loader={"dataset": Sentences()},
        feature_norm=4.0, max_grad_norm=6.0, criterion=F.cross_entropy, batch_order="poisson",
    )  # fmt: skip
    if has_trainer:
        accelerate()

        class Trainer(library.Trainer):
            def get_train_dataloader(self):
                return run.loader

        arguments = library.TrainingArguments(
            output_dir=str(tmp_path), num_train_epochs=2, save_strategy="no", report_to=[],
            use_cpu=True, lr_scheduler_type="constant", logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        Trainer(
            model=run.model, args=arguments, optimizers=(run.optimizer, None),
            train_dataset=run.loader.dataset,
        ).train()  # fmt: skip
    else:
        for _ in range(2):
            run.model.train()
            for batch in fetched_ahead(run.loader):
                run.optimizer.zero_grad()
                run.model(**batch).loss.backward()
                run.optimizer.step()
    event = run.engine.privacy_event
    assert event.num_steps == 12
    assert event.loss == hsa.LossGeometry.softmax_cross_entropy(4.0, bias=True)
    assert not any(isinstance(p, nn.Dropout) and p.training for p in model.modules())
