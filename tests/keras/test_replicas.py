"""Two replicas are refused in every way that a private optimizer can meet them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "reference" / "keras_replicas.py"
KINDS = (
    "CyclicDPKerasSGDOptimizer",
    "BlockCoordinateKerasOptimizer",
)
WAYS = ("constructed_in_scope", "fit_without_callback", "own_loop", "fit")
TEXT = "UnsupportedRunError: Expected no distribution strategy, got MirroredStrategy with 2"


@pytest.mark.slow
def test_mirrored_strategy_is_refused():
    pytest.importorskip("tensorflow_privacy")
    result = subprocess.run(
        [sys.executable, SCRIPT], capture_output=True, text=True, check=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    found = dict(line.split(" | ", 1) for line in result.stdout.splitlines() if " | " in line)
    assert set(found) == {f"{kind} {way}" for kind in KINDS for way in WAYS}
    for case, text in found.items():
        assert text.startswith(TEXT), f"{case}: {text}"
        assert "Train outside of strategy.scope()." in text
