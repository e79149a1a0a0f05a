"""Attacks on what a model says: they refute what forgets a part of the run, and not the model."""

import attrs
import pytest
from dp_accounting import NeighboringRelation

pytest.importorskip("tensorflow")
import tensorflow as tf
from dice_outlier import DiceOutlier
from keras_models import AUTO, DELTA, SGD, X, Y, fit, make

import hidden_state_accountants as hsa
from hidden_state_accountants.auditing.linear_losses import LinearLosses
from hidden_state_adapters import batch_plans
from hidden_state_adapters.tf_privacy import DiceUpdate

pytestmark = pytest.mark.usefixtures("row_by_row", "without_graphs")
SPECIAL, EPOCHS = NeighboringRelation.REPLACE_SPECIAL, 5


def fitted(optimizer, more=(), **settings):
    model = make(optimizer, **{"l2_norm_clip": 2.0, **settings})
    return fit(model, epochs=EPOCHS, validation_data=(X, Y), callbacks=list(more))


def epsilon(event, relation=SPECIAL):
    return hsa.LastIterateAccountant(relation).compose(event).get_epsilon(DELTA)


def shown(attack, event, relation=SPECIAL):
    return attack.evidence(event, relation, lambda text: None).epsilon(DELTA)


def test_what_early_stopping_saw():
    """The iterates of all epochs, of which decay would hide the first ones, show more."""
    stops = tf.keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=100.0)
    model = fitted(
        SGD(0.5, weight_decay=0.9),
        [stops],
        validation_data_is_public=True,
        **AUTO,
    )
    event = model.privacy_event
    found = shown(LinearLosses(), event)
    assert epsilon(attrs.evolve(event, release_steps=())) < 0.6 * found
    assert epsilon(attrs.evolve(event, num_steps=6, release_steps=(3,))) < 0.8 * found
    assert found <= model.get_epsilon(DELTA)


def test_what_dice_sgd_feeds_back():
    """An outlier saturates the error, which moves every later step."""
    rule = DiceUpdate(SGD(0.5), error_l2_norm_clip=2.0)
    model = fitted(rule, l2_norm_clip=0.5, noise_multiplier=40.0)
    event = model.privacy_event
    found = shown(DiceOutlier(), event)
    without = attrs.evolve(event, error_clip_norm=1e-6)
    assert hsa.DiceSgdAccountant().compose(without).get_epsilon(DELTA) < 0.1 * found
    assert found <= model.get_epsilon(DELTA)


@pytest.mark.parametrize(
    ("order", "draws"),
    [
        ("poisson", list(range(15))),
        ("without_replacement", list(range(15))),
        ("reshuffled", list(range(EPOCHS))),
        ("shuffled_once", [0]),
    ],
)
def test_secret_batches_are_drawn_by_the_operating_system(order, draws, monkeypatch):
    """For every step, for every epoch, or once: nobody who knows a seed knows the batches."""
    drawn = []

    def noted(name):
        original = getattr(batch_plans.RandomKeys, name)

        def method(keys, number, *arguments):
            assert keys == batch_plans.RandomKeys()  # no seed, no secret
            drawn.append(number)
            return original(keys, number, *arguments)

        monkeypatch.setattr(batch_plans.RandomKeys, name, method)

    for name in ("subset", "permutation"):
        noted(name)
    fitted(SGD(0.5), batch_order=order)
    assert list(dict.fromkeys(drawn)) == draws  # a subset may be what another one leaves out
