"""The code blocks of the README run as they stand."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)


def test_there_are_blocks():
    assert len(BLOCKS) == 2


@pytest.mark.filterwarnings("ignore:Secure RNG", "ignore:Full backward hook")
@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block(block, capsys):
    if "torch" in block:
        pytest.importorskip("opacus")
        pytest.importorskip("sklearn")
    exec(compile(block, str(README), "exec"), {})
    epsilon, *explanation = capsys.readouterr().out.splitlines()
    assert 0 < float(epsilon) <= 1
    if "torch" in block:
        assert float(explanation[0].strip("tensor()")) > 0.75
    assert any("REPLACE_SPECIAL" in line for line in explanation)
