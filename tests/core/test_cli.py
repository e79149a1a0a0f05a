import inspect
import io
import json
import subprocess
import sys

import attrs
import pytest
from runs import block_run, cyclic_run, dice_run, full_run

import hidden_state_accountants as hsa

pytest.importorskip("typer")

from hidden_state_accountants.cli.app import run
from hidden_state_accountants.cli.run_file import template

RUN = """
noise_multiplier = 2.0
learning_rate = 0.5
clip_norm = 1.0
batch_size = 5
dataset_size = 20
num_steps = 24
batch_order = "cyclic"
weight_decay = 0.2
[loss]
kind = "convex"
smoothness = 1.0
lipschitz = 1.0
"""
FLAGS = (
    "--noise-multiplier 2 --learning-rate 0.5 --clip-norm 1 --batch-size 5 --dataset-size 20 "
    "--num-steps 24 --batch-order cyclic --weight-decay 0.2 --loss convex --smoothness 1 "
    "--lipschitz 1"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path


@pytest.fixture
def hsa_json(capsys):
    def call(command):
        status = run([*command.split(), "--json", "--quiet"])
        captured = capsys.readouterr()
        assert status == 0, captured.err
        assert captured.err == ""
        return json.loads(captured.out)

    return call


def epsilon(event, delta=1e-5):
    return hsa.LastIterateAccountant().compose(event).get_epsilon(delta)


def test_epsilon_from_a_file_from_flags_and_from_both(folder, hsa_json):
    expected = epsilon(cyclic_run())
    for command in ("epsilon run.toml", f"epsilon {FLAGS}", "epsilon run.toml --num-steps 24"):
        found = hsa_json(command)
        assert found["epsilon"] == expected
        assert found["event"] == cyclic_run().to_dict()
    found = hsa_json("epsilon run.toml --noise-multiplier 4 --epochs 3 --delta 1e-6")
    assert found["epsilon"] == epsilon(cyclic_run(noise_multiplier=4.0, num_steps=12), 1e-6)


def test_a_delta_that_protects_nobody_is_named(folder, capsys):
    text = "not below 1/n for n = 20 records"
    for delta, is_said in (("0.05", True), ("1e-3", False)):
        assert run(["epsilon", "run.toml", "--delta", delta, "--quiet"]) == 0
        assert (text in capsys.readouterr().err) == is_said
    assert run("recommend --dataset-size 50 --epsilon 1 --delta 0.1".split()) == 0
    assert "n = 50 records" in capsys.readouterr().err


def test_every_field_of_the_event_has_a_flag(folder, hsa_json):
    event = hsa_json(
        "epsilon --noise-multiplier 1 --learning-rate 0.25 --clip-norm none --batch-size 4 "
        "--dataset-size 8 --epochs 3 --batch-order cyclic --loss hoelder --constant 2 "
        "--exponent 1 --lipschitz 3 --weight-decay 0.1 --domain-diameter 5 --release-steps 2,4 "
    )["event"]
    assert hsa.LastIterateDpEvent.from_dict(event) == hsa.LastIterateDpEvent(
        noise_multiplier=1.0,
        learning_rate=0.25,
        clip_norm=None,
        batch_size=4,
        dataset_size=8,
        num_steps=6,
        batch_order="cyclic",
        loss=hsa.LossGeometry.hoelder(2.0, 1.0, lipschitz=3.0),
        weight_decay=0.1,
        domain_diameter=5.0,
        release_steps=(2, 4),
    )
    capped = hsa_json("epsilon run.toml --batch-order poisson --loss none --max-batch-size 20")
    assert capped["event"]["max_batch_size"] == 20
    rate = hsa_json("epsilon run.toml --batch-order poisson --sampling-rate 0.1 --epochs 3")
    expected = cyclic_run(batch_order="poisson", sampling_rate=0.1, num_steps=30)
    assert rate["event"] == expected.to_dict()
    assert rate["epsilon"] == epsilon(expected)
    groups = hsa_json("epsilon run.toml --is-microbatched --relation replace_one")
    assert groups["event"] == cyclic_run(is_microbatched=True).to_dict()


@pytest.mark.parametrize(
    ("flags", "loss"),
    [
        ("none", None),
        ("convex --smoothness 0.5", hsa.LossGeometry.convex(0.5)),
        ("logistic --feature-norm 2 --bias", hsa.LossGeometry.logistic(2.0, True)),
        (
            "envelope-logistic --feature-norm 2 --loss-clip-norm 0.3 --smoothing 1.5",
            hsa.LossGeometry.envelope_logistic(2.0, clip_norm=0.3, smoothing=1.5),
        ),
    ],
)
def test_losses(folder, hsa_json, flags, loss):
    event = hsa_json(f"epsilon run.toml --loss {flags}")["event"]
    assert hsa.LastIterateDpEvent.from_dict(event) == cyclic_run(loss=loss)


SCHEDULED = cyclic_run(
    noise_multiplier=[2.0] * 12 + [3.0] * 12,
    learning_rate=[0.5, 0.25] * 12,
    loss=hsa.LossGeometry.weakly_convex(1.0, 0.25),
    release_steps=(5,),
)


def toml(value):
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(part)}" for key, part in value.items()) + "}"
    return json.dumps(value)


@pytest.mark.parametrize(
    "event", [SCHEDULED, dice_run(), block_run()], ids=["schedules", "dice", "blocks"]
)
def test_the_dictionary_form_of_an_event_is_a_run_file(folder, hsa_json, event):
    lines = [f"{key} = {toml(value)}" for key, value in event.to_dict().items()]
    (folder / "event.toml").write_text("\n".join(lines))
    found = hsa_json("epsilon event.toml")
    assert type(event).from_dict(found["event"]) == event
    assert found["epsilon"] == pytest.approx(epsilon(event))


def test_delta(folder, hsa_json):
    found = hsa_json("delta run.toml --epsilon 2.5")
    assert found["delta"] == hsa.LastIterateAccountant().compose(cyclic_run()).get_delta(2.5)


@pytest.mark.parametrize(
    ("flags", "field", "change"),
    [
        ("", "noise_multiplier", lambda value: {"noise_multiplier": value * 0.999}),
        (
            "--parameter epochs --weight-decay 0.01",
            "epochs",
            lambda value: {"num_steps": 4 * (value + 1)},
        ),
    ],
)
def test_calibrate(folder, hsa_json, flags, field, change):
    found = hsa_json(f"calibrate run.toml --target-epsilon 6 {flags}")
    event = hsa.LastIterateDpEvent.from_dict(found["event"])
    assert found["epsilon"] == epsilon(event) <= 6
    assert epsilon(attrs.evolve(event, **change(found[field]))) > 6


def test_calibrate_needs_no_value_for_what_it_finds(hsa_json):
    flags = FLAGS.replace("--noise-multiplier 2", "")
    assert hsa_json(f"calibrate {flags} -e 1")["noise_multiplier"] > 2
    flags = FLAGS.replace("--num-steps 24", "")
    assert hsa_json(f"calibrate {flags} -e 6 --parameter epochs")["epochs"] > 1


def test_compare(folder, hsa_json):
    found = hsa_json("compare run.toml --delta 1e-5 --delta 1e-4")
    (table,) = found["runs"]
    assert table["label"] == "run.toml"
    expected = hsa.compare(cyclic_run(), [1e-5, 1e-4])
    for row, plain in zip(expected.rows, table["rows"], strict=True):
        assert (plain["accountant"], plain["epsilon"]) == (row.accountant, row.epsilon)


@pytest.mark.slow
def test_compare_several_files_as_text_and_as_a_picture(folder, capsys):
    pytest.importorskip("matplotlib")
    (folder / "other.toml").write_text(RUN)
    command = "compare run.toml other.toml --num-steps 4 --plot out.svg"
    assert run(command.split()) == 0
    captured = capsys.readouterr()
    assert "the best is composition" in captured.out
    assert captured.out.count("ANOTHER ALGORITHM") == 2
    assert "compare: run 2 of 2" in captured.err
    assert (folder / "out.svg").read_text().startswith("<?xml")


def test_explain(folder, capsys, hsa_json):
    assert run(["explain", "run.toml", "-q"]) == 0
    text = capsys.readouterr().out
    assert "theorem: Theorem A" in text
    assert "assumption, declared" in text
    assert "not used: " not in text
    assert run(["explain", "run.toml", "-q", "--bounds"]) == 0
    assert "not used: " in capsys.readouterr().out
    assert hsa_json("explain run.toml")["explanation"][0].startswith("theorem: ")


def test_audit_exits_with_1_if_the_claim_is_refuted(folder, capsys):
    (folder / "full.toml").write_text(
        RUN.replace("batch_size = 5", "batch_size = 20").replace("cyclic", "full")
    )
    command = ["audit", "full.toml", "--num-steps", "2", "--quiet", "--json"]
    assert run(command) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["claimed"] == pytest.approx(epsilon(full_run(num_steps=2)), rel=1e-3)
    assert run([*command, "--claim-epsilon", str(report["claimed"] / 4)]) == 1


def test_init_writes_a_file_that_works_and_overwrites_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run(["init", "new.toml"]) == 0
    capsys.readouterr()
    assert run(["epsilon", "new.toml"]) == 0
    assert capsys.readouterr().out.startswith("epsilon = 1.993, delta = 1e-05 (REPLACE_SPECIAL)")
    assert run(["init", "new.toml"]) == 2
    assert run(["init", "new.toml", "--force"]) == 0
    capsys.readouterr()
    assert run(["init", "-"]) == 0
    assert capsys.readouterr().out == template()


def test_init_names_every_field():
    for field in attrs.fields(hsa.LastIterateDpEvent):
        assert field.name in template()
    for order in hsa.BatchOrder:
        assert order.value in template()
    losses = [n for n, _ in inspect.getmembers(hsa.LossGeometry, inspect.ismethod) if n[0] != "_"]
    assert len(losses) > 12
    for loss in losses:
        assert f'kind = "{loss}"' in template()


BAD = {
    "epsilon": "--noise-multiplier",
    "epsilon missing.toml": "missing.toml: No such file",
    "epsilon broken.toml": "broken.toml: not a TOML file",
    "epsilon typo.toml": "typo.toml: Unknown key in LastIterateDpEvent: noise. Did you mean",
    "epsilon kind.toml": "kind.toml: Expected type to be one of LastIterateDpEvent",
    "epsilon run.toml --noise-multiplier -1": "Expected finite noise_multiplier >= 0, got -1.0.",
    "epsilon run.toml --batch-order ciclic": "got 'ciclic'. Did you mean 'cyclic'?",
    "epsilon run.toml --accountant lastiterate": "Did you mean 'last_iterate'?",
    "epsilon run.toml --num-steps 4 --epochs 1": "got both",
    "epsilon run.toml --loss logistic": "feature_norm (optional: bias) for the loss logistic",
    "epsilon run.toml --relation add_or_remove_one": "covers the run. composition: neighb",
    "epsilon run.toml --batch-size 3": "which leaves 2 records over",
    "delta run.toml": "--epsilon",
    "calibrate run.toml": "--target-epsilon",
    "recommend": "Missing option '--dataset-size'",
    "profile run.toml --batch-order poisson": "Expected CYCLIC batches for a profile, got POISSON",
    "calibrate run.toml -e 1e-3 --parameter epochs": "what one epoch costs",
    "nonsense": "No such command",
    "epsilon run.toml --noise-multipler 2": "Did you mean 'noise-multiplier'?",
    "epsilon run.toml other.toml": "Expected one file, got run.toml, other.toml",
    "epsilon broken.pt": "broken.pt: not a checkpoint that HiddenStatePrivacyEngine saved",
}


@pytest.mark.parametrize("command", BAD)
def test_bad_input_is_one_line_and_status_2(folder, capsys, command):
    (folder / "broken.toml").write_text("= 1")
    (folder / "broken.pt").write_text("= 1")
    (folder / "typo.toml").write_text(f"noise = 1\n{RUN}")
    (folder / "kind.toml").write_text('type = "GaussianDpEvent"')
    assert run(command.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("hsa: ")
    assert BAD[command] in line


def test_no_arguments_show_the_help(capsys):
    assert run([]) == 0
    assert "calibrate" in capsys.readouterr().out
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"{hsa.__version__}\n"


def module(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "hidden_state_accountants", *arguments],
        capture_output=True,
        text=True,
        check=False,
        **options,
    )


def test_the_module_is_the_command(folder):
    result = module("epsilon", "run.toml", "--noise-multiplier", "-1")
    assert result.returncode == 2
    expected = "run.toml with these flags: Expected finite noise_multiplier >= 0, got -1.0."
    assert result.stderr == f"hsa: {expected}\n"


def test_without_typer_the_command_says_what_to_install(tmp_path):
    (tmp_path / "typer.py").write_text("raise ImportError('No module named typer')")
    result = module("epsilon", env={"PYTHONPATH": str(tmp_path)})
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "pip install 'hidden-state-accountants[cli]'" in line


def test_a_file_from_the_standard_input_with_numbers_in_powers_of_ten(folder, capsys, monkeypatch):
    assert run(["epsilon", "run.toml", "--num-steps", "1e4"]) == 0
    expected = capsys.readouterr().out
    lines = [line for line in RUN.splitlines() if not line.startswith(("num_steps", "epochs"))]
    text = "\n".join(["num_steps = 1e4", *lines])
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert run(["epsilon", "-"]) == 0
    assert capsys.readouterr().out == expected


def test_recommend(capsys):
    command = "recommend --dataset-size 1200 --epsilon 1 --classes 10 --orders cyclic,full"
    command += " --epochs 16"
    assert run([*command.split(), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["candidates"]
    expected = hsa.recommend(1200, 1.0, 1e-5, classes=10, orders=["cyclic", "full"], epochs=16)
    assert found == json.loads(json.dumps(expected.to_dict()["candidates"]))
    assert run(command.split()) == 0
    assert capsys.readouterr().out == f"{expected}\n"
