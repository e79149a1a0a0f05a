"""DiceSGD with HiddenStateCallback: the event of what ran, or an error."""

import math

import attrs
import pytest
from dp_accounting import NeighboringRelation

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import (
    CyclicDPKerasSGDOptimizer,
    DiceKerasAdamOptimizer,
    DiceKerasSGDOptimizer,
)

pytestmark = pytest.mark.usefixtures("row_by_row")
DELTA = 1e-5
BOUND = 1.4143  # of the logistic loss on unit rows with a bias
EXPECTED = hsa.DiceSgdDpEvent(
    noise_std=40.0 * 0.25 / 4, clip_norm=0.25, error_clip_norm=0.125, batch_size=4,
    dataset_size=24, num_steps=12, batch_order="cyclic", gradient_bound=BOUND,
)  # fmt: skip


def dice(kind=DiceKerasSGDOptimizer, **kwargs):
    return kind(0.25, 40.0, **{"error_l2_norm_clip": 0.125, "learning_rate": 0.5, **kwargs})


@pytest.fixture
def make_dice(make_run, compile_options):
    def make(optimizer=None, compile=None, **callback):
        run = make_run(callback={"gradient_bound": BOUND, **callback})
        run.optimizer = optimizer or dice()
        loss = tf.keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")
        run.model.compile(run.optimizer, loss, **(compile_options if compile is None else compile))
        return run

    return make


def exact(event, relation=NeighboringRelation.REPLACE_SPECIAL):
    return hsa.DiceSgdAccountant(relation).compose(event).get_epsilon(DELTA)


@pytest.mark.parametrize("mode", [{}, {"jit_compile": True}])
def test_the_event_and_the_epsilon_of_every_epoch(make_dice, mode):
    run = make_dice(compile=mode, target_delta=DELTA)
    history = run.fit(epochs=2).history["epsilon_if_released_now"]
    assert run.callback.privacy_event == EXPECTED
    assert history == [exact(attrs.evolve(EXPECTED, num_steps=6)), exact(EXPECTED)]
    assert history[0] < history[1] < math.inf
    assert run.callback.get_epsilon(DELTA) == history[1]
    assert run.callback.guarantee.neighboring_relation is NeighboringRelation.REPLACE_SPECIAL


def test_adam_and_automatic(make_dice):
    run = make_dice(dice(DiceKerasAdamOptimizer), gradient_bound=math.inf)
    run.fit(epochs=2)
    assert run.callback.privacy_event == attrs.evolve(EXPECTED, gradient_bound=math.inf)
    run = make_dice(dice(automatic=True))
    run.fit(epochs=2)
    assert run.callback.privacy_event == attrs.evolve(EXPECTED, automatic=True)


def test_releases_and_checkpoints_cost_nothing_more(make_dice, tmp_path):
    """All iterates are accounted; the optimizer's own state holds noisy updates only."""
    run = make_dice()
    save = tf.keras.callbacks.ModelCheckpoint(str(tmp_path / "a.keras"))
    run.fit(callbacks=[save])
    run.callback.release()
    run.fit(callbacks=[save])
    assert run.callback.privacy_event == EXPECTED


# --- what is refused ------------------------------------------------------------------------------


def bound_that_the_run_does_not_have(make_dice):
    make_dice(gradient_bound=0.1).fit()


def bound_for_another_optimizer(make_dice):
    make_dice(CyclicDPKerasSGDOptimizer(1.0, 1.0)).fit()


CASES = {
    bound_that_the_run_does_not_have: "longer than loss_geometry.lipschitz, or gradient_bound",
    bound_for_another_optimizer: "gradient_bound for a Dice optimizer",
}


@pytest.mark.parametrize("act", CASES, ids=lambda act: act.__name__)
def test_refused(make_dice, act):
    with pytest.raises(hsa.UnsupportedRunError, match=CASES[act]):
        act(make_dice)
