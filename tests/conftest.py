"""Shared test settings; helper modules live in tests/reference."""

import os
import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent / "reference"))

settings.register_profile("ci", deadline=None, derandomize=True)
settings.register_profile("dev", deadline=None)
# For "make test-deep": examples, in hundreds, where "ci" has one hundred.
deep_examples = 100 * int(os.environ.get("DEEP_EXAMPLES", "18"))
settings.register_profile("deep", deadline=None, max_examples=deep_examples)
settings.load_profile("ci" if os.environ.get("CI") else "dev")
