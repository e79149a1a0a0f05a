"""`record_position`: a figure for the records of one batch never looks like one for all."""

import json

import attrs
import dp_accounting
import numpy as np
import pytest
from dp_accounting import NeighboringRelation
from runs import cyclic_run, full_run, probe_run

import hidden_state_accountants as hsa
from hidden_state_accountants.figures import text_up
from hidden_state_accountants.guarantee import Topic
from hidden_state_accountants.runs.statement import Statement

SPECIAL = NeighboringRelation.REPLACE_SPECIAL
OF_RUNS = [bound for bound in hsa.BOUNDS if bound.event_type is hsa.LastIterateDpEvent]
ALL, FIRST = cyclic_run(), cyclic_run(record_position=0)

COVERING = [bound for bound in OF_RUNS if not bound.check(FIRST, SPECIAL)]


def guarantee_of(event):
    return hsa.LastIterateAccountant().compose(event).guarantee


def largest():
    """As it is printed."""
    return f"other records have epsilon up to {text_up(guarantee_of(ALL).epsilon(1e-5))}"


class TestGuarantee:
    def test_the_run_of_the_table(self):
        """0.0595 was printed like 1.995, the epsilon of the run."""
        guarantee = guarantee_of(probe_run(record_position=0))
        assert guarantee.epsilon(1e-5) == pytest.approx(0.0595, abs=5e-5)
        text = guarantee.explain()
        assert "ONLY FOR records of batch 0 of every epoch; other records have epsilon" in text
        assert "epsilon up to 1.995 at delta 1e-05" in text

    @pytest.mark.parametrize("bound", COVERING, ids=lambda bound: bound.name)
    def test_every_bound_says_so(self, bound):
        guarantee = bound.guarantee(FIRST, SPECIAL)
        assert guarantee.only_for == "records of batch 0 of every epoch"
        (assumed,) = [a for a in guarantee.assumptions if a.topic is Topic.RECORDS]
        assert "record_position = 0" in assumed.text
        whole = bound.guarantee(ALL, SPECIAL)
        assert guarantee.of_all_records().epsilon(1e-5) == whole.epsilon(1e-5)

    def test_several_runs_together(self):
        other = cyclic_run(noise_multiplier=7.0)
        part = hsa.LastIterateAccountant().compose(FIRST, 2).compose(other)
        whole = hsa.LastIterateAccountant().compose(ALL, 2).compose(other)
        together = part.compose(dp_accounting.GaussianDpEvent(9.0)).guarantee
        whole.compose(dp_accounting.GaussianDpEvent(9.0))
        assert together.only_for == "records of batch 0 of every epoch"
        everyone = together.of_all_records()
        assert everyone.epsilon(1e-6) == whole.get_epsilon(1e-6) > together.epsilon(1e-6)

    def test_claims_in_an_audit(self):
        assert "only for records of batch 0" in str(hsa.audit(guarantee_of(FIRST), FIRST))
        assert "only for" not in str(hsa.audit(guarantee_of(ALL), ALL))

    @pytest.mark.parametrize("layout", ["lines", "paragraphs"])
    def test_statements(self, layout):
        for event, is_said in ((FIRST, True), (ALL, False)):
            guarantee = guarantee_of(event)
            statement = Statement([event], guarantee, guarantee.assumptions, 1e-5)
            text = " ".join(getattr(statement, layout)().split())
            assert ("ONLY FOR" in text and largest() in text) == is_said


class TestExports:
    def test_standard_events(self):
        for export in (guarantee_of(FIRST).to_dpevent, FIRST.as_composition):
            with pytest.raises(ValueError, match="for all records, got one for records of batch 0"):
                export()
        found = guarantee_of(FIRST).to_dpevent(for_one_position=True)
        assert found.noise_multiplier == pytest.approx(1 / guarantee_of(FIRST).mu)
        assert FIRST.as_composition(for_one_position=True) == ALL.as_composition()  # full epochs

    @pytest.mark.parametrize(
        "calibrate", [hsa.calibrate_noise, hsa.calibrate_epochs, hsa.calibrate_weight_decay]
    )
    def test_calibration(self, calibrate):
        target = guarantee_of(FIRST).epsilon(1e-5) * 1.01
        with pytest.raises(ValueError, match="for_one_position=True"):
            calibrate(target, 1e-5, FIRST)
        assert calibrate(target, 1e-5, FIRST, for_one_position=True) > 0


class TestCompare:
    @pytest.fixture(scope="class")
    @staticmethod
    def table():
        return hsa.compare(FIRST)

    def test_every_row_says_so(self, table):
        for row in table.rows:
            is_about_one = row.epsilon is not None and "PLD" not in row.accountant
            is_about_one = is_about_one and row.accountant != "RdpAccountant"  # of all records
            assert row.scope.startswith("records of batch 0 of every epoch; ") == is_about_one
        assert not any(row.scope for row in hsa.compare(ALL).rows)

    def test_everything_that_is_printed(self, table):
        assert f"ONLY FOR {FIRST.records}; {largest()} at delta 1e-05." in table.summary()
        assert table.to_markdown().count("ONLY FOR") > 5
        (run,) = table.to_dict()["runs"]
        assert largest() in json.dumps(run)


class TestCommandLine:
    @pytest.fixture
    @staticmethod
    def hsa_command(tmp_path, capsys):
        pytest.importorskip("typer")
        from hidden_state_accountants.cli.app import run

        path = tmp_path / "run.toml"
        path.write_text(
            "noise_multiplier = 2.0\nlearning_rate = 0.5\nclip_norm = 1.0\nbatch_size = 5\n"
            'dataset_size = 20\nnum_steps = 24\nbatch_order = "cyclic"\nweight_decay = 0.2\n'
            '[loss]\nkind = "convex"\nsmoothness = 1.0\nlipschitz = 1.0\n'
        )

        def call(command, *flags):
            status = run([command, str(path), *flags])
            return status, capsys.readouterr()

        return call

    @pytest.mark.slow
    @pytest.mark.parametrize("command", ["epsilon", "explain", "compare", "audit"])
    def test_commands_that_print_an_epsilon(self, hsa_command, command):
        status, printed = hsa_command(command, "--record-position", "0")
        assert status == 0
        assert "only for records of batch 0" in " ".join(printed.out.split()).lower()
        assert "only for" not in hsa_command(command)[1].out.lower()

    def test_profile(self, hsa_command):
        status, printed = hsa_command("profile")
        assert status == 0
        assert printed.out.splitlines()[0] == "epsilon = 2.6567, delta = 1e-05 (REPLACE_SPECIAL)"
        assert "records of batch 0 of every epoch: 1.6698" in printed.out
        found = json.loads(hsa_command("profile", "--json")[1].out)
        assert found["epsilon_by_position"] == hsa.position_profile(ALL).tolist()


class TestProfile:
    @pytest.mark.parametrize(
        ("changes", "relation"),
        [
            ({"num_steps": 22}, NeighboringRelation.REPLACE_ONE),
            ({"learning_rate": np.linspace(0.5, 0.1, 24), "release_steps": (3, 9)}, SPECIAL),
        ],
    )
    def test_the_epsilon_of_the_run_is_the_largest(self, changes, relation):
        event = cyclic_run(**changes)
        profile = hsa.position_profile(event, 1e-6, relation)
        whole = hsa.LastIterateAccountant(relation).compose(event).get_epsilon(1e-6)
        assert profile.shape == (4,)
        assert profile.max() == pytest.approx(whole, rel=1e-9)
        for position, epsilon in enumerate(profile):
            run = attrs.evolve(event, record_position=position)
            alone = hsa.LastIterateAccountant(relation).compose(run).get_epsilon(1e-6)
            assert epsilon == alone <= whole * (1 + 1e-9)

    def test_what_has_no_positions(self):
        with pytest.raises(ValueError, match="Only a CYCLIC order has positions"):
            hsa.position_profile(full_run())
        with pytest.raises(TypeError, match="LastIterateDpEvent"):
            hsa.position_profile(dp_accounting.GaussianDpEvent(1.0))
        with pytest.raises(ValueError, match="target_delta"):
            hsa.position_profile(ALL, 2.0)
