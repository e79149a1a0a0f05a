"""A selection of upstream's own tests on ours; the scripts beside this file run them all."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.exhaustive


def output_of(script, *arguments):
    result = subprocess.run(
        [sys.executable, pathlib.Path(__file__).parent / script, *arguments],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, (result.stdout + result.stderr)[-5000:]
    return result.stdout


def test_opacus():
    pytest.importorskip("opacus")
    text = output_of("run_opacus_suite.py", "-k", "not privacy_engine_test or TiedWeightsHooksTest")
    used = re.search(r"^(\d+) tests passed with a private optimizer", text, re.MULTILINE)
    assert int(used.group(1)) >= 38, used.group()


def test_tf_privacy():
    pytest.importorskip("tensorflow_privacy")
    names = ["TensorLoss", "ClippingNorm", "NoiseMultiplier", "LargeBatch", "NoCallOf"]
    text = output_of("run_tf_privacy_suite.py", *names)
    for line in (
        "CyclicDPKerasSGDOptimizer: 16 cases apply, 11 do not and fail as they must",
        "DiceKerasAdamOptimizer: 3 cases apply, 2 do not and fail as they must",
    ):
        assert line in text
