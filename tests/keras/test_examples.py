"""The examples run as they are, in seconds, and print what they promise."""

import pathlib
import re
import runpy
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "promised"),
    [
        ("keras_cyclic.py", ["epoch 2: epsilon if the model were released now"]),
        ("keras_mnist_tutorial.py", ["Test accuracy of the released model"]),
        (
            "keras_custom_loop.py",
            ["Test accuracy of the released model", "clip norm and noise as recorded"],
        ),
    ],
)
def test_example(name, promised, monkeypatch, capsys):
    pytest.importorskip("tensorflow_privacy")
    pytest.importorskip("sklearn")
    monkeypatch.setattr(sys, "argv", [name, "--epochs", "2"])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    shown = capsys.readouterr().out
    for text in (*promised, "Privacy of the released model"):
        assert text in " ".join(shown.split())
    last, every = (
        float(re.search(rf"^epsilon {which} ([\d.]+)", shown, re.MULTILINE)[1])
        for which in ("=", "if every iterate were released:")
    )
    assert 0 < last < every
