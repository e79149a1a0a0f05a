"""What is said of a run: statements, what is declared, the guide and the examples."""

import pathlib
import re
import runpy
import sys

import dp_accounting
import pytest
from declared_lines import FIXED_RECORDS, GEOMETRY, OF_EVERY_RUN, listed
from dp_accounting import NeighboringRelation

pytest.importorskip("tensorflow")
import keras_models
import tensorflow as tf
from keras_models import AUTO, DELTA, EXPECTED, SGD, X, Y

import hidden_state_accountants as hsa
import hidden_state_adapters.tf_privacy as adapter
from hidden_state_adapters.tf_privacy import compute_last_iterate_privacy_statement

ROOT = pathlib.Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "keras.md"


# --- the statement --------------------------------------------------------------------------------


@pytest.mark.parametrize("relation", ["REPLACE_SPECIAL", "REPLACE_ONE"])
def test_the_statement(relation):
    """Its lines are tested in core/test_statement.py."""
    text = compute_last_iterate_privacy_statement(EXPECTED, DELTA, relation)
    accountant = hsa.LastIterateAccountant(NeighboringRelation[relation]).compose(EXPECTED)
    shown = float(re.search(r"^epsilon = ([0-9.]+)", text, re.MULTILINE)[1])
    assert shown == pytest.approx(accountant.get_epsilon(DELTA), abs=1e-4)
    assert relation in text
    assert all(line in text for line in OF_EVERY_RUN)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ((dp_accounting.GaussianDpEvent(1.0), DELTA), TypeError),
        ((EXPECTED, DELTA, "REPLACE"), ValueError),
        ((EXPECTED, DELTA, NeighboringRelation.ADD_OR_REMOVE_ONE), hsa.UnsupportedRunError),
    ],
)
def test_refused(arguments, kind):
    with pytest.raises(kind):
        compute_last_iterate_privacy_statement(*arguments)


def test_the_figures_beside_those_of_tf_privacy_on_the_page():
    """docs/keras.md, "Why is my epsilon different?": the table."""
    privacy = pytest.importorskip("tensorflow_privacy")
    page = GUIDE.read_text()
    lines = ("default (`used_microbatching=True`)", "one example each", '="cyclic"`, any optimizer')
    default, single, ours = (
        float(re.search(rf"^\|.*{re.escape(line)} \| ([\d.]+) \|$", page, re.MULTILINE)[1])
        for line in lines
    )

    def theirs(**options):
        text = privacy.compute_dp_sgd_privacy_statement(1500, 150, 20, 6.0, 1e-5, **options)
        return float(re.search(r"occurring once per epoch: +([\d.]+)", text)[1])

    run = hsa.LastIterateDpEvent(
        noise_multiplier=6.0, learning_rate=0.5, clip_norm=1.4143, weight_decay=0.005,
        batch_size=150, dataset_size=1500, num_steps=200, batch_order="cyclic",
    )  # fmt: skip
    every = hsa.LastIterateAccountant().compose(run).get_epsilon(1e-5)
    assert theirs() == pytest.approx(default, abs=0.005)
    assert theirs(used_microbatching=False) == pytest.approx(single, abs=0.005)
    assert every == pytest.approx(ours, abs=0.005)


# --- what is declared -----------------------------------------------------------------------------

EVERY = (*OF_EVERY_RUN, FIXED_RECORDS, GEOMETRY)
SOFTMAX = hsa.LossGeometry.softmax_cross_entropy(1.0, bias=True)
KINDS = {
    "head": (AUTO, (FIXED_RECORDS,)),
    "declared": ({"loss_geometry": SOFTMAX}, (FIXED_RECORDS, GEOMETRY)),
    "composition": ({}, ()),
}


@pytest.mark.usefixtures("without_graphs")
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_and_a_run(kind):
    options, more = KINDS[kind]
    given = {"l2_norm_clip": 2.1, "noise_multiplier": 2.0, "batch_order": "cyclic", **options}
    model = keras_models.fit(keras_models.make(SGD(0.1, weight_decay=0.1), **given), epochs=3)
    run = adapter.PrivateRun(
        tf.keras.Sequential([tf.keras.layers.Dense(2)]), X, Y, loss=keras_models.crossentropy(),
        batch_size=4, optimizer=SGD(0.1, weight_decay=0.1), **given,
    )  # fmt: skip
    run.train(3, verbose=False)
    for told in (model, run):
        assert listed(told.guarantee, EVERY) == [*OF_EVERY_RUN, *more]
        assert told.guarantee.assumptions == told.assumptions


@pytest.mark.usefixtures("without_graphs")
def test_a_callback(make_run):
    pytest.importorskip("tensorflow_privacy")
    run = make_run()
    run.fit(epochs=3)
    assert listed(run.callback.guarantee, EVERY) == list(EVERY)


# --- pages and examples ---------------------------------------------------------------------------


@pytest.mark.slow
def test_the_code_of_the_guide_runs(capsys):
    pytest.importorskip("tensorflow_privacy")
    pytest.importorskip("sklearn")
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert len(blocks) >= 4
    program = "\n".join(blocks).replace("range(20)", "range(2)")
    program = re.sub(r"epochs=\d+", "epochs=2", program)
    exec(compile(program, GUIDE.name, "exec"), {"__name__": "__main__"})
    shown = capsys.readouterr().out
    reports = re.findall("Privacy of the released model|Privacy of all iterates", shown)
    assert len(reports) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "promised"),
    [
        ("keras_cyclic.py", "epoch 2: epsilon if the model were released now"),
        ("keras_mnist_tutorial.py", "Test accuracy of the released model"),
        ("keras_custom_loop.py", "clip norm and noise as recorded"),
    ],
)
def test_example(name, promised, monkeypatch, capsys):
    pytest.importorskip("tensorflow_privacy")
    pytest.importorskip("sklearn")
    monkeypatch.setattr(sys, "argv", [name, "--epochs", "2"])
    runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    shown = capsys.readouterr().out
    for text in (promised, "Privacy of the released model"):
        assert text in " ".join(shown.split())
    last, every = (
        float(re.search(rf"^epsilon {which} ([\d.]+)", shown, re.MULTILINE)[1])
        for which in ("=", "if every iterate were released:")
    )
    assert 0 < last < every
