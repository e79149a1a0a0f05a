"""DiceSGD and DiceAdam in Keras: the error is in no file, text or copy."""

import copy
import pickle
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tensorflow_privacy")
import tensorflow as tf

import hidden_state_accountants as hsa
from hidden_state_adapters.tf_privacy import DiceKerasAdamOptimizer, DiceKerasSGDOptimizer

pytestmark = pytest.mark.usefixtures("restored_precision")


MARK = 777.25  # the error of the one record below: a value that stands out
# With its point: addresses and digests have digits of their own, at random.
SHOWN = re.compile(r"77[78]\.25")
NEEDLES = [kind(MARK).tobytes() for kind in (np.float32, np.float64)]


def error_of(optimizer):
    return np.concatenate([np.ravel(part) for part in optimizer._steps.step.rule._errors]).tolist()


def marked(variant="sgd", dtype="float64", **options):
    """A compiled model whose optimizer has the error MARK in one coordinate."""
    model = tf.keras.Sequential([tf.keras.layers.Dense(1, use_bias=False, dtype=dtype)])
    model.build((None, 1))
    kind = DiceKerasSGDOptimizer if variant == "sgd" else DiceKerasAdamOptimizer
    optimizer = kind(1.0, 1.0, learning_rate=0.0, **options)
    model.compile(optimizer, "mse")
    features = tf.constant([[MARK + 1]], dtype)
    optimizer.minimize(lambda: tf.reduce_sum(model(features), 1), model.trainable_variables)
    assert error_of(optimizer) == [MARK]
    return model, optimizer


def content(path):
    path = Path(path)
    files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
    return b"".join(f.read_bytes() for f in files)


SAVERS = {
    "keras": lambda model, path: model.save(f"{path}.keras"),
    "h5": lambda model, path: model.save(f"{path}.h5"),
    "savedmodel": lambda model, path: model.save(f"{path}/model", save_format="tf"),
    "weights_h5": lambda model, path: model.save_weights(f"{path}.weights.h5"),
    "weights_tf": lambda model, path: model.save_weights(f"{path}/weights"),
    "checkpoint": lambda model, path: tf.train.Checkpoint(
        model=model, optimizer=model.optimizer
    ).save(f"{path}/checkpoint"),
}


@pytest.mark.parametrize(
    ("saver", "variant"), zip(SAVERS, ["sgd", "adam"] * 3, strict=True), ids=str
)
def test_the_error_is_in_no_file(tmp_path, saver, variant):
    """Read as bytes, uncompressed, and that the search would find a weight."""
    model, _ = marked(variant)
    if variant == "sgd":  # something that must be found
        model.layers[0].kernel.assign([[-555.25]])
    SAVERS[saver](model, tmp_path / "saved")
    if saver == "keras":  # a zip file
        with zipfile.ZipFile(tmp_path / "saved.keras") as file:
            file.extractall(tmp_path / "extracted")
    found = content(tmp_path)
    assert not any(needle in found for needle in NEEDLES)
    if variant == "sgd":
        assert np.float64(-555.25).tobytes() in found


def test_the_error_is_in_no_text_and_no_config():
    _, optimizer = marked()
    config = optimizer.get_config(), tf.keras.optimizers.serialize(optimizer)
    for text in (repr(optimizer), str(optimizer), vars(optimizer), config):
        assert not SHOWN.search(str(text))


def test_copies_and_pickles_start_anew():
    _, optimizer = marked("adam", amsgrad=True)
    assert not any(needle in pickle.dumps(optimizer) for needle in NEEDLES)
    for again in (
        copy.copy(optimizer),
        copy.deepcopy(optimizer),
        pickle.loads(pickle.dumps(optimizer)),
    ):
        assert type(again) is DiceKerasAdamOptimizer
        assert again.get_config() == optimizer.get_config()
        assert again.last_step.steps == 0
        assert again._steps is None
    for copier in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(hsa.UnsupportedRunError, match="cannot be copied or pickled"):
            copier(optimizer._steps.step.rule)


@pytest.mark.parametrize("suffix", [".keras", ".h5", ""])
def test_a_loaded_optimizer_starts_another_run(tmp_path, suffix):
    """Keras restores its own state of a legacy optimizer from .h5 only."""
    model, optimizer = marked("adam", "float32")
    model.save(tmp_path / f"model{suffix}")
    loaded = tf.keras.models.load_model(tmp_path / f"model{suffix}")
    assert type(loaded.optimizer) is DiceKerasAdamOptimizer
    assert loaded.optimizer.get_config() == optimizer.get_config()
    check_another_run(loaded, loaded.optimizer, 1 if suffix == ".h5" else 0)


def check_another_run(model, again, before):
    features = tf.constant([[0.25]])
    again.minimize(lambda: tf.reduce_sum(model(features), 1), model.trainable_variables)
    assert int(again.iterations) == before + 1  # Keras' count, and the moments, go on
    assert error_of(again) == [0.0]  # 0.25 is not clipped
    assert again.last_step.steps == 1
