"""The command line: every command gives the figures of the package, and says what it cannot do."""

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


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path


@pytest.fixture
def printed(capsys):
    def call(command, status=0):
        assert run(command.split()) == status
        return capsys.readouterr()

    return call


@pytest.fixture
def hsa_json(printed):
    def call(command):
        captured = printed(f"{command} --json --quiet")
        assert captured.err == ""
        return json.loads(captured.out)

    return call


def epsilon(event, delta=1e-5):
    return hsa.LastIterateAccountant().compose(event).get_epsilon(delta)


def test_epsilon_from_a_file_from_flags_and_from_both(hsa_json):
    for command in ("epsilon run.toml", f"epsilon {FLAGS}", "epsilon run.toml --num-steps 24"):
        found = hsa_json(command)
        assert found["epsilon"] == epsilon(cyclic_run())
        assert found["event"] == cyclic_run().to_dict()
    found = hsa_json("epsilon run.toml --noise-multiplier 4 --epochs 3 --delta 1e-6")
    assert found["epsilon"] == epsilon(cyclic_run(noise_multiplier=4.0, num_steps=12), 1e-6)
    found = hsa_json("delta run.toml --epsilon 2.5")
    assert found["delta"] == hsa.LastIterateAccountant().compose(cyclic_run()).get_delta(2.5)


def test_the_accounting_of_a_file_counts_unless_a_flag_says_otherwise(folder, hsa_json):
    table = '[accounting]\ndelta = 1e-6\nneighboring_relation = "replace_one"\n'
    (folder / "replaced.toml").write_text(RUN + table)
    replaced = hsa.LastIterateAccountant("replace_one").compose(cyclic_run())
    assert hsa_json("epsilon replaced.toml")["epsilon"] == replaced.get_epsilon(1e-6)
    found = hsa_json("epsilon replaced.toml --delta 1e-5 --relation replace_special")
    assert found["epsilon"] == epsilon(cyclic_run())


def test_a_file_from_the_standard_input_with_numbers_in_powers_of_ten(printed, monkeypatch):
    text = RUN.replace("num_steps = 24", "num_steps = 1e4")
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    assert printed("epsilon -").out == printed("epsilon run.toml --num-steps 1e4").out


def test_a_delta_that_protects_nobody_is_named(printed):
    text = "not below 1/n for n = 20 records"
    assert text in printed("epsilon run.toml --delta 0.05 --quiet").err
    assert text not in printed("epsilon run.toml --delta 1e-3 --quiet").err
    small = "recommend --dataset-size 50 --epsilon 1 --delta 0.1"
    assert "n = 50 records" in printed(small).err


POISSON = "--batch-order poisson"


@pytest.mark.parametrize(
    ("flags", "changes"),
    [
        (f"{POISSON} --loss none --max-batch-size 20",
         {"batch_order": "poisson", "loss": None, "max_batch_size": 20}),
        (f"{POISSON} --sampling-rate 0.1 --epochs 3",
         {"batch_order": "poisson", "sampling_rate": 0.1, "num_steps": 30}),
        ("--is-microbatched --relation replace_one", {"is_microbatched": True}),
        ("--domain-diameter 5 --release-steps 2,4",
         {"domain_diameter": 5.0, "release_steps": (2, 4)}),
        ("--clip-norm none --loss hoelder --constant 2 --exponent 1 --lipschitz 3",
         {"clip_norm": None, "loss": hsa.LossGeometry.hoelder(2.0, 1.0, lipschitz=3.0)}),
        ("--loss convex --smoothness 0.5", {"loss": hsa.LossGeometry.convex(0.5)}),
        ("--loss logistic --feature-norm 2 --bias", {"loss": hsa.LossGeometry.logistic(2.0, True)}),
        ("--loss envelope-logistic --feature-norm 2 --loss-clip-norm 0.3 --smoothing 1.5",
         {"loss": hsa.LossGeometry.envelope_logistic(2.0, clip_norm=0.3, smoothing=1.5)}),
    ],
)  # fmt: skip
def test_every_field_of_the_event_has_a_flag(hsa_json, flags, changes):
    event = hsa_json(f"epsilon run.toml {flags}")["event"]
    assert hsa.LastIterateDpEvent.from_dict(event) == cyclic_run(**changes)


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


def test_calibrate(hsa_json):
    """Without a value for what it finds, too."""
    flags = FLAGS.replace("--noise-multiplier 2", "")
    found = hsa_json(f"calibrate {flags} --target-epsilon 6")
    noise, event = found["noise_multiplier"], hsa.LastIterateDpEvent.from_dict(found["event"])
    assert found["epsilon"] == epsilon(event) <= 6
    assert epsilon(attrs.evolve(event, noise_multiplier=noise * 0.999)) > 6
    flags = FLAGS.replace("--num-steps 24", "").replace("decay 0.2", "decay 0.01")
    found = hsa_json(f"calibrate {flags} -e 6 --parameter epochs")
    event = hsa.LastIterateDpEvent.from_dict(found["event"])
    assert found["epsilon"] == epsilon(event) <= 6
    assert epsilon(attrs.evolve(event, num_steps=4 * (found["epochs"] + 1))) > 6


@pytest.mark.slow
def test_compare(folder, printed, hsa_json):
    """As JSON, as text and as a picture."""
    pytest.importorskip("matplotlib")
    (folder / "other.toml").write_text(RUN)
    (table, _) = hsa_json("compare run.toml other.toml --delta 1e-4")["runs"]
    assert table["label"] == "run.toml"
    for row, plain in zip(hsa.compare(cyclic_run(), 1e-4).rows, table["rows"], strict=True):
        assert (plain["accountant"], plain["epsilon"]) == (row.accountant, row.epsilon)
    captured = printed("compare run.toml other.toml --num-steps 4 --plot out.svg")
    assert "the best is composition" in captured.out
    assert captured.out.count("ANOTHER ALGORITHM") == 2
    assert "compare: run 2 of 2" in captured.err
    assert (folder / "out.svg").read_text().startswith("<?xml")


def test_gain(printed, hsa_json):
    assert "would it gain: " in printed("gain run.toml --quiet").out
    found = hsa_json("gain run.toml --loss none")
    assert (found["verdict"], found["epsilon"]) == ("no", found["every_iterate"])


def test_explain(printed, hsa_json):
    text = printed("explain run.toml -q").out
    assert "theorem: Theorem A" in text
    assert "not used: " not in text
    assert "not used: " in printed("explain run.toml -q --bounds").out
    assert hsa_json("explain run.toml")["explanation"][0].startswith("theorem: ")


def test_audit_exits_with_1_if_the_claim_is_refuted(printed):
    command = "audit run.toml --batch-size 20 --batch-order full --num-steps 2 --quiet --json"
    claimed = json.loads(printed(command).out)["claimed"]
    assert claimed == pytest.approx(epsilon(full_run(num_steps=2)), rel=1e-3)
    printed(f"{command} --claim-epsilon {claimed / 4}", status=1)


def test_recommend(printed):
    command = "recommend --dataset-size 1200 --epsilon 1 --classes 10 --orders full --epochs 16"
    expected = hsa.recommend(1200, 1.0, 1e-5, classes=10, orders=["full"], epochs=16)
    found = json.loads(printed(f"{command} --json").out)["candidates"]
    assert found == json.loads(json.dumps(expected.to_dict()["candidates"]))
    assert printed(command).out == f"{expected}\n"


def test_init_writes_a_file_that_works_names_every_field_and_overwrites_nothing(printed):
    printed("init new.toml")
    assert printed("epsilon new.toml").out.startswith("epsilon = 1.993, delta = 1e-05 (REPLACE_SPE")
    printed("init new.toml", status=2)
    printed("init new.toml --force")
    text = printed("init -").out
    assert text == template()
    losses = [n for n, _ in inspect.getmembers(hsa.LossGeometry, inspect.ismethod) if n[0] != "_"]
    assert len(losses) > 12
    for name in (
        *(field.name for field in attrs.fields(hsa.LastIterateDpEvent)),
        *(order.value for order in hsa.BatchOrder),
        *(f'kind = "{loss}"' for loss in losses),
    ):
        assert name in text


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
    "delta run.toml": "--epsilon",
    "calibrate run.toml": "--target-epsilon",
    "recommend": "Missing option '--dataset-size'",
    "profile run.toml --batch-order poisson": "Expected CYCLIC batches for a profile, got POISSON",
    "nonsense": "No such command",
    "epsilon run.toml --noise-multipler 2": "Did you mean 'noise-multiplier'?",
    "epsilon run.toml other.toml": "Expected one file, got run.toml, other.toml",
    "epsilon broken.pt": "broken.pt: not a checkpoint that HiddenStatePrivacyEngine saved",
}


@pytest.mark.parametrize("command", BAD)
def test_bad_input_is_one_line_and_status_2(folder, printed, command):
    (folder / "broken.toml").write_text("= 1")
    (folder / "broken.pt").write_text("= 1")
    (folder / "typo.toml").write_text(f"noise = 1\n{RUN}")
    (folder / "kind.toml").write_text('type = "GaussianDpEvent"')
    captured = printed(command, status=2)
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("hsa: ")
    assert BAD[command] in line


def test_no_arguments_show_the_help(printed):
    assert "calibrate" in printed("").out
    assert printed("--version").out == f"{hsa.__version__}\n"


def module(*arguments, **options):
    command = [sys.executable, "-m", "hidden_state_accountants", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def test_the_module_is_the_command_and_says_what_to_install_for_it(folder):
    result = module("epsilon", "run.toml", "--noise-multiplier", "-1")
    assert result.returncode == 2
    expected = "run.toml with these flags: Expected finite noise_multiplier >= 0, got -1.0."
    assert result.stderr == f"hsa: {expected}\n"
    (folder / "typer.py").write_text("raise ImportError('No module named typer')")
    result = module("epsilon", env={"PYTHONPATH": str(folder)})
    assert result.returncode == 2
    (line,) = result.stderr.splitlines()
    assert "pip install 'hidden-state-accountants[cli]'" in line
