"""The code of docs/keras.md runs, block after block."""

import pathlib
import re
import subprocess
import sys

import pytest

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "keras.md"


@pytest.mark.slow
def test_the_code_of_the_guide_runs(tmp_path):
    pytest.importorskip("tensorflow_privacy")
    pytest.importorskip("sklearn")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 4
    program = "\n".join(blocks).replace("range(20)", "range(2)")
    script = tmp_path / "guide.py"
    script.write_text(re.sub(r"epochs=\d+", "epochs=2", program))
    result = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr[-3000:]
    reports = re.findall("Epsilon of the released model|Privacy of all iterates", result.stdout)
    assert len(reports) == 4
