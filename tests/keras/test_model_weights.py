"""Weights of classes and examples: factors of the gradients, with constants that grow with them."""

import numpy as np
import pytest

pytest.importorskip("tensorflow")
import keras_models
import tensorflow as tf
from keras_models import AUTO, BATCH, FEATURES, RECORDS, SGD, X

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import DiceUpdate
from hidden_state_adapters.tf_privacy.settings import Declared

pytestmark = pytest.mark.usefixtures("row_by_row", "without_graphs")
CLASSES = 3
Y = np.arange(RECORDS) % CLASSES
OF_CLASSES, OF_EXAMPLES = {0: 0.5, 1: 1.0, 2: 2.0}, np.linspace(0, 2, RECORDS)
PLAIN = hsa.LossGeometry.softmax_cross_entropy(1.0, bias=True)


def make(optimizer=None, **settings):
    given = {"l2_norm_clip": 9.0, **settings}
    return keras_models.make(optimizer, [keras_models.head(CLASSES)], **given)


def fit(model, **kwargs):
    return keras_models.fit(model, **{"y": Y, **kwargs})


def steps(weights, clip):
    """The run without noise, in float64; cyclic batches."""
    kernel, bias = np.ones((FEATURES, CLASSES)), np.zeros(CLASSES)
    for start in range(0, RECORDS, BATCH):
        x, y, w = (part[start : start + BATCH] for part in (X.astype(float), Y, weights))
        slopes = np.exp(x @ kernel + bias)
        slopes /= slopes.sum(1, keepdims=True)
        slopes[np.arange(len(y)), y] -= 1
        slopes *= w[:, None]
        norms = np.linalg.norm(slopes, axis=1) * np.sqrt((x**2).sum(1) + 1)
        slopes *= (clip / np.maximum(norms, clip))[:, None]
        kernel = kernel - 0.5 / BATCH * x.T @ slopes
        bias = bias - 0.5 / BATCH * slopes.sum(0)
    return kernel, bias


@pytest.mark.parametrize(("clip", "optimizer"), [(0.7, None), (9.0, None), (9.0, "dice")])
def test_a_step_is_that_of_weighted_losses(clip, optimizer):
    """Also with what DiceSGD feeds back, as long as nothing is clipped."""
    update = optimizer and DiceUpdate(SGD(0.5))
    model = fit(
        make(update, l2_norm_clip=clip, noise_multiplier=0.0),
        class_weight=OF_CLASSES,
        sample_weight=OF_EXAMPLES,
    )
    weights = np.array([OF_CLASSES[label] for label in Y]) * OF_EXAMPLES
    for own, other in zip(model.get_weights(), steps(weights, clip), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "settings", "largest"),
    [
        ({"class_weight": OF_CLASSES}, {}, 2.0),
        ({"class_weight": OF_CLASSES, "sample_weight": OF_EXAMPLES}, {"weight_bound": 4.0}, 8.0),
        ({"sample_weight": OF_EXAMPLES / 4}, {"weight_bound": 0.5}, 0.5),
    ],
    ids=["classes", "both", "small"],
)
@pytest.mark.parametrize("said", [AUTO, {"loss_geometry": PLAIN}], ids=["auto", "word"])
def test_constants_grow_with_the_weights(arguments, settings, largest, said):
    """Gradients of weight 2 are longer than the bound of the plain loss, and are in the run."""
    model = fit(make(noise_multiplier=0.01, **said, **settings), **arguments)
    loss = model.privacy_event.loss
    assert loss.lipschitz == largest * PLAIN.lipschitz
    assert loss.smoothness == largest * PLAIN.smoothness
    longest = model._run.steps.last_step.largest_norm
    assert longest <= loss.lipschitz
    if largest == 2:
        assert longest > PLAIN.lipschitz
    texts = [str(assumption) for assumption in model.assumptions]
    assert any("depend on nothing but their example" in text for text in texts)
    assert any(f"a weight of at most {largest:g}" in text for text in texts) == (said is AUTO)


class Triples(tf.keras.utils.Sequence):
    def __len__(self):
        return RECORDS // BATCH

    def __getitem__(self, index):
        part = slice(index * BATCH, (index + 1) * BATCH)
        return X[part], Y[part], OF_EXAMPLES[part]


def singly():
    return tf.data.Dataset.from_tensor_slices((X, Y, OF_EXAMPLES))


@pytest.mark.parametrize(
    "source",
    [singly, lambda: singly().batch(BATCH), Triples, lambda: (b for b in list(Triples()))],
    ids=["single", "batched", "sequence", "generator"],
)
def test_weights_that_come_with_the_examples(source):
    """The same run as with arrays, with the same constants and demands."""
    given = {"x": source(), "y": None, "steps_per_epoch": RECORDS // BATCH}
    settings = {"noise_multiplier": 0.0}
    beside = fit(make(**settings), sample_weight=OF_EXAMPLES, class_weight=OF_CLASSES)
    model = fit(make(**settings), class_weight=OF_CLASSES, **given)
    for own, other in zip(model.get_weights(), beside.get_weights(), strict=True):
        np.testing.assert_allclose(own, other, atol=1e-6)
    assert model.privacy_event == beside.privacy_event
    fit(model, class_weight=OF_CLASSES, **given)  # the one that was read
    as_arrays = {**given, "x": X, "y": Y, "class_weight": OF_CLASSES}
    fit(model, **as_arrays, sample_weight=OF_EXAMPLES)
    with pytest.raises(hsa.UnsupportedRunError, match="examples of the run so far"):
        fit(model, **as_arrays)
    assert model.privacy_event.num_steps == 9


def test_a_bound_for_dice_grows_too():
    update = DiceUpdate("sgd", error_l2_norm_clip=0.1, gradient_bound=2.0)
    model = fit(make(update), class_weight=OF_CLASSES)
    assert model.privacy_event.gradient_bound == 4.0


def test_composition_needs_no_bound():
    model = fit(make("adam"), sample_weight=OF_EXAMPLES)
    assert model.privacy_event.loss is None
    assert model.get_epsilon(1e-5) == pytest.approx(fit(make("adam")).get_epsilon(1e-5), rel=1e-9)


@pytest.mark.parametrize(
    "loss",
    [
        hsa.LossGeometry.strongly_convex(2.0, 0.5, 3.0),
        hsa.LossGeometry.weakly_convex(2.0, 0.5, 3.0),
        hsa.LossGeometry.smooth(2.0, 3.0),
        hsa.LossGeometry.hoelder(2.0, 0.5, 3.0),
        hsa.LossGeometry.linear(3.0),
    ],
    ids=lambda loss: loss.kind.value,
)
def test_every_kind_of_loss(loss):
    """A weight may be 0: of strong convexity nothing is left."""
    found = Declared(loss_geometry=loss).weighted(3.0).geometry
    assert (found.smoothness, found.lipschitz) == (3 * loss.smoothness, 9.0)
    assert (found.strong_convexity, found.weak_convexity) == (0.0, 3 * loss.weak_convexity)


NEGATIVE, SHORT = np.full(RECORDS, -1.0), np.ones(3)


@pytest.mark.parametrize(
    ("arguments", "settings", "text"),
    [
        ({"sample_weight": OF_EXAMPLES}, AUTO, "Expected weight_bound="),
        ({"sample_weight": OF_EXAMPLES}, {"weight_bound": 1.0}, "weight_bound = 1, got a larger"),
        ({"sample_weight": NEGATIVE}, {}, "finite and >= 0"),
        ({"sample_weight": SHORT}, {}, r"shape \(12,\)"),
        ({"class_weight": {0: 1.0, 1: 1.0}}, {}, "classes of class_weight"),
        ({"class_weight": {0: -1.0}}, {}, "class_weight"),
        (
            {"x": tf.data.Dataset.from_tensor_slices((X, Y)), "y": None, "sample_weight": SHORT},
            {},
            "depends on its order",
        ),
    ],
    ids=lambda value: "",
)
def test_refusals(arguments, settings, text):
    model = make(**settings)
    with pytest.raises((hsa.UnsupportedRunError, TypeError, ValueError), match=text):
        fit(model, **arguments)
    with pytest.raises(ValueError, match="Call fit"):
        model.get_epsilon(1e-5)


def test_other_weights_are_another_run():
    model = fit(make(), sample_weight=OF_EXAMPLES)
    fit(model, sample_weight=OF_EXAMPLES)
    for other in (None, OF_EXAMPLES[::-1]):
        with pytest.raises(hsa.UnsupportedRunError, match="examples of the run so far"):
            fit(model, sample_weight=other)
    assert model.privacy_event.num_steps == 6


def test_other_weights_of_a_class_that_no_example_has():
    """Another example could have had it: the constants of the loss are those of the largest."""
    alike = {"y": np.zeros(RECORDS, int)}
    model = fit(make(**AUTO), class_weight={0: 1.0, 1: 1.0}, **alike)
    with pytest.raises(hsa.UnsupportedRunError, match="another example could have"):
        fit(model, class_weight={0: 1.0, 1: 9.0}, **alike)
    fit(model, class_weight={0: 1.0, 1: 0.5}, **alike)
