"""Trainers of Lightning and transformers log the epsilon of the last iterate after every epoch."""

import sys
import types

import attrs
import pytest

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import log_epsilon

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DELTA = 1e-5


class Trainer:
    """What both trainers have, of the shape of theirs."""

    def __init__(self):
        self.callbacks, self.logged = [], []

    def add_callback(self, callback):
        self.callbacks.append(callback)

    def log(self, entries):
        self.logged.append(entries["epsilon_if_released_now"])

    def ends_epoch(self):
        for callback in self.callbacks:
            if hasattr(callback, "on_epoch_end"):
                callback.on_epoch_end(None, None, None)
            else:
                module = types.SimpleNamespace(log=lambda name, value: self.log({name: value}))
                callback.on_train_epoch_end(self, module)


@pytest.mark.parametrize(
    ("package", "base"),
    [("lightning", "Callback"), ("pytorch_lightning", "Callback"),
     ("transformers", "TrainerCallback")],
)  # fmt: skip
def test_the_epsilon_of_every_epoch_is_that_of_a_run_that_ends_there(
    make_run, monkeypatch, package, base
):
    fake = types.ModuleType(package)
    setattr(fake, base, type(base, (), {}))
    monkeypatch.setitem(sys.modules, package, fake)
    theirs = type("Trainer", (Trainer,), {"__module__": f"{package}.trainer"})
    trainer = type("Mine", (theirs,), {})()  # a subclass in the user's own module
    run = make_run(batch_order="cyclic")
    log_epsilon(trainer, run.engine, DELTA)
    assert isinstance(trainer.callbacks[0], getattr(fake, base))
    for _ in range(2):
        run.epoch()
        trainer.ends_epoch()
    whole = run.engine.privacy_event
    half = attrs.evolve(whole, num_steps=whole.num_steps // 2)
    ends = [hsa.LastIterateAccountant().compose(e).get_epsilon(DELTA) for e in (half, whole)]
    assert trainer.logged == ends
    assert ends[1] < 2 * ends[0]


def test_no_other_trainer(make_run):
    with pytest.raises(TypeError, match=r"In a loop of your own log engine\.get_epsilon"):
        log_epsilon(Trainer(), make_run().engine, DELTA)
