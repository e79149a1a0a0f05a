"""`hsa epsilon checkpoint.pt` says what the engine that saved it says."""

import json

import pytest

import hidden_state_accountants as hsa

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def test_the_epsilon_of_the_engine(make_run, tmp_path, capsys):
    command = pytest.importorskip("hidden_state_accountants.cli.app").run
    run = make_run()
    run.epoch()
    path = tmp_path / "checkpoint.pt"
    run.engine.save_checkpoint(path=path)
    assert command(["epsilon", str(path), "--delta", "1e-6", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["epsilon"] == run.engine.get_epsilon(1e-6)
    assert hsa.LastIterateDpEvent.from_dict(found["event"]) == run.engine.privacy_event
    assert command(["explain", str(path), "--quiet"]) == 0
    assert "theorem: " in capsys.readouterr().out
    assert command(["epsilon", str(path), "--noise-multiplier", "4"]) == 2
    assert "Expected no --noise-multiplier beside a run" in capsys.readouterr().err
    assert command(["epsilon", str(path), "--relation", "replace_one"]) == 2
    assert "Expected the relation of the checkpoint, REPLACE_SPECIAL" in capsys.readouterr().err
