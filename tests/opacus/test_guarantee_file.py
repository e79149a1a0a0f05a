"""What is proven, in files beside a saved model."""

import json

import pytest

import hidden_state_accountants as hsa

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

DELTA = 1e-5


def test_the_files_say_what_the_engine_says(make_run, tmp_path):
    run = make_run()
    run.epoch()
    run.engine.guarantee.save(tmp_path / "model.json", DELTA)
    found = json.loads((tmp_path / "model.json").read_text())
    assert found["epsilon"] == run.engine.get_epsilon(DELTA)
    texts = {text for texts in found["assumptions"].values() for text in texts}
    assert texts == {assumption.text for assumption in run.engine.assumptions}
    assert hsa.LastIterateDpEvent.from_dict(found["event"]) == run.engine.privacy_event
    assert f"| what ran | {run.engine.privacy_event!r} |" in (tmp_path / "model.md").read_text()
