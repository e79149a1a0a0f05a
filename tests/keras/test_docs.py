"""The code of docs/keras.md runs, block after block."""

import pathlib
import re

import pytest

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "keras.md"


@pytest.mark.slow
def test_the_code_of_the_guide_runs(capsys):
    pytest.importorskip("tensorflow_privacy")
    pytest.importorskip("sklearn")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 4
    program = "\n".join(blocks).replace("range(20)", "range(2)")
    program = re.sub(r"epochs=\d+", "epochs=2", program)
    exec(compile(program, PAGE.name, "exec"), {"__name__": "__main__"})
    shown = capsys.readouterr().out
    reports = re.findall("Privacy of the released model|Privacy of all iterates", shown)
    assert len(reports) == 4
