"""Several processes that train one run: as one process would, or not at all."""

import itertools
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import processes
import pytest
from processes import BATCH, CASES, RECORDS, Group, trajectories

import hidden_state_accountants as hsa
from hidden_state_adapters.opacus import Batches
from hidden_state_adapters.opacus.order import drawn_rate

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(scope="module")
def two():
    group = Group(2)
    yield group
    group.close()


@pytest.fixture(scope="module")
def three():
    group = Group(3)
    yield group
    group.close()


@pytest.fixture(scope="module")
def of_one():
    return trajectories()


# 3 processes do not divide a batch of 10.
@pytest.mark.parametrize(
    ("group", "cases"), [("two", tuple(CASES)), ("three", ("cyclic", "poisson", "deep", "dice"))]
)
def test_trajectories_are_those_of_one_process(group, cases, of_one, request):
    for found in request.getfixturevalue(group).call("trajectories", cases):
        for case in cases:
            assert found[case] == pytest.approx(of_one[case], abs=1e-6), case
    assert np.abs(np.subtract(of_one["noise"], of_one["cyclic"])).max() > 0.01


@pytest.mark.cuda
def test_a_trajectory_on_a_gpu(two, of_one):
    for found in two.call("trajectory_on", "cuda:0"):
        assert found == pytest.approx(of_one["cyclic"], abs=1e-5)


@pytest.mark.parametrize("order", ["cyclic", "poisson"])
def test_epsilon_is_that_of_one_process(two, order):
    expected, _, other = processes.epsilon(order)
    for epsilon, report, weights in two.call("epsilon", order):
        assert epsilon == expected
        assert np.abs(np.subtract(weights, other)).max() > 0.01  # noise of its own
        assert "2 processes with disjoint parts of every batch" in report
        assert ("SHAKE-128" in report) == (order == "poisson")


@pytest.mark.parametrize(
    "order", ["cyclic", "full", "shuffled_once", "reshuffled", "without_replacement", "poisson"]
)
def test_parts_are_disjoint_and_together_the_batch(three, order):
    parts = three.call("used_records", order)
    steps = []
    for own in zip(*parts, strict=True):
        steps.append(sorted(itertools.chain(*own)))
        sizes = [len(part) for part in own]
        assert len(set(steps[-1])) == sum(sizes)
        assert max(sizes) - min(sizes) <= 1
        if order != "poisson":
            assert sum(sizes) == (RECORDS if order == "full" else BATCH)
    if order in ("cyclic", "shuffled_once", "reshuffled"):
        for epoch in (steps[:3], steps[3:]):
            assert sorted(itertools.chain(*epoch)) == list(range(RECORDS))
    if order != "full":
        assert (steps[:3] == steps[3:]) == (order in ("cyclic", "shuffled_once"))
        again = three.call("used_records", order)
        assert (again == parts) == (order == "cyclic")  # another run has another secret order


def test_poisson_batches_of_a_stock_engine(two):
    for epsilon, event in two.call("stock_epsilon"):
        assert event.sampling_probability == drawn_rate(BATCH / RECORDS)
        assert (event.batch_order.value, event.batch_size, event.num_steps) == ("poisson", BATCH, 3)
        accountant = hsa.LastIterateAccountant().compose(event)
        assert epsilon == accountant.get_epsilon(1e-5)


def test_other_batches_of_a_stock_engine_are_half_of_those_of_a_step(two):
    for outcome in two.call("stock_run", False):
        assert "Expected one process, got 2 with DataLoader" in outcome


# --- one process does something else -------------------------------------------------------------


@pytest.mark.parametrize(
    ("misuse", "arguments", "text"),
    [
        ("skips_a_step", (), "Process 1 of 2 refused: step 2.* a piece of a batch was delivered|"
         "Process 1 of 2 refused: step 2 used batch 2, expected batch 1"),
        ("refuses_a_step", (0,), "Process 0 of 2 refused: .*not what the loader drew"),
        ("refuses_a_piece", (), "Process 1 of 2 refused: .*not what the loader drew"),
        ("changes", ("lr", 0.25), "different steps: process 0 has step 2.*'lr': 0.5.*process 1 has "
         "step 2.*'lr': 0.25"),
        ("changes", ("max_grad_norm", 9.0), "max_grad_norm = 2.1.*process 1 .*max_grad_norm = 9.0"),
        ("writes_a_parameter", (), "Process 1 of 2 refused: step 2: the parameters were"),
        ("takes_one_step_too_many", (), "num_steps"),
    ],
)  # fmt: skip
def test_what_one_process_refuses_ends_the_run_in_all(two, misuse, arguments, text):
    """But for a step that all know to be none."""
    (found, has_epsilon), other = two.call(misuse, *arguments)
    assert re.search(text, found), found
    assert other == (found, has_epsilon)
    assert has_epsilon == (misuse == "takes_one_step_too_many")


@pytest.mark.parametrize(
    ("options", "others", "name"),
    [
        ({"wrapper": None, "distributed": True}, {"seed": 1}, "weights of the initial model"),
        ({}, {"max_grad_norm": 2.2}, "max_grad_norm"),
        ({"batch_order": "reshuffled"}, {"batch_order": "cyclic"}, "batch_order"),
        (
            {"batch_order": Batches("shuffled_once", seed=1)},
            {"batch_order": Batches("shuffled_once", seed=2)},
            "seed of the order",
        ),
        ({"records": 1}, {"records": 2}, "data set"),
    ],
)
def test_a_process_with_another_program_is_refused(two, options, others, name):
    found, other = two.call("starts_with", options, others)
    assert found == other
    assert f"Expected the same {name}" in found
    assert "process 1" in found


def test_a_process_whose_arguments_are_refused(two):
    found, other = two.call("starts_with", {}, {"max_grad_norm": -1.0})
    assert "Process 1 of 2 refused: Expected" in found
    assert other.startswith("ValueError")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"wrapper": None}, "Expected a model in Opacus' DPDDP"),
        ({"distributed": False}, "Expected a model in Opacus' DPDDP"),
        (
            {"ghost": True, "deep": True, "loss_geometry": None, "max_grad_norm": 0.3},
            'Expected grad_sample_mode = "hooks" with DistributedDataParallel',
        ),
        ({"sampler": True}, "DistributedSampler: a sampler may repeat"),
        ({"loader": {"batch_size": 1}}, "Expected a batch_size >= 2"),
    ],
)
def test_what_no_group_can_train(two, options, text):
    for outcome in two.call("starts_with", options, {}):
        assert text in outcome


def test_sharded_parameters_are_refused_by_name(two):
    for outcome in two.call("shards_the_model"):
        assert "Expected whole parameters in every process, got FSDP" in outcome


def test_distributed_without_a_group(make_run):
    with pytest.raises(hsa.UnsupportedRunError, match="init_process_group before make_private"):
        make_run(distributed=True)


# --- what one process is told --------------------------------------------------------------------


def test_what_one_process_was_told_all_know_at_the_next_step(two):
    for releases, _ in two.call("tells", "release"):
        assert releases == (1,)
    for text in two.call("tells", "refuse"):
        assert "was looked at after step 1" in text
    for _, assumptions in two.call("tells", "assume"):
        assert "influences nothing" in assumptions


@pytest.mark.parametrize("order", ["poisson", "reshuffled"])
def test_a_checkpoint_is_written_once_and_goes_on_everywhere(two, order, tmp_path):
    whole = processes.Training(batch_order=processes.SEEDED[order]).epochs(1)
    for files, weights in two.call("resumes", str(tmp_path), order):
        assert files == [True, False]
        assert weights == pytest.approx(whole.weights, abs=1e-6)
    for _, text in two.call("resumes", str(tmp_path), "cyclic", True):
        assert "Expected the same number of steps in all processes" in text


# --- processes that are gone ---------------------------------------------------------------------


def test_a_process_that_dies_ends_the_others():
    group = Group(2)
    try:
        for pipe in group.pipes:
            pipe.send(("dies", ()))
        text, has_epsilon = group.pipes[0].recv()
        assert "ended or did not answer in time" in text
        assert not has_epsilon
    finally:
        group.close()


@pytest.mark.exhaustive
def test_the_example_runs_under_torchrun():
    pytest.importorskip("sklearn")
    example = pathlib.Path(__file__).resolve().parents[2] / "examples" / "linear_probe_ddp.py"
    result = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
         example, "--epochs", "2"],
        capture_output=True, text=True, check=False, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "2 processes with disjoint parts of every batch" in result.stdout
    assert result.stdout.count("Privacy of the released model") == 1
