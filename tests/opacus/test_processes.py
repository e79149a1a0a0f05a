"""Several processes that train one run: as one process would, or not at all."""

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
    moved = [weights for case, weights in of_one.items() if case != "noise"]
    assert np.abs(np.subtract(of_one["noise"], of_one["cyclic"])).max() > 0.01
    assert all(isinstance(weights, list) for weights in moved)


@pytest.mark.cuda
def test_a_trajectory_on_a_gpu(two, of_one):
    for found in two.call("trajectory_on", "cuda:0"):
        assert found == pytest.approx(of_one["cyclic"], abs=1e-5)


def test_noise_is_that_of_one_process(three):
    """2500 draws: their standard deviation is known to 1.4 per cent; six times that is allowed."""
    found = [np.array(moved) for moved in three.call("first_noise", 3.0, 0.7)]
    assert all(np.array_equal(moved, found[0]) for moved in found)
    assert found[0].std() == pytest.approx(2.1, rel=0.085)
    assert abs(found[0].mean()) < 6 * 2.1 / np.sqrt(len(found[0]))
    again = np.array(three.call("first_noise", 3.0, 0.7)[0])
    assert abs(np.corrcoef(again, found[0])[0, 1]) < 0.12


@pytest.mark.parametrize("order", ["cyclic", "poisson"])
def test_epsilon_is_that_of_one_process(two, order):
    expected, _ = processes.epsilon(order)
    for epsilon, report in two.call("epsilon", order):
        assert epsilon == expected
        assert "2 processes with disjoint parts of every batch" in report
        assert ("SHAKE-128" in report) == (order == "poisson")


@pytest.mark.parametrize(
    "order", ["cyclic", "full", "shuffled_once", "reshuffled", "without_replacement", "poisson"]
)
def test_parts_are_disjoint_and_together_the_batch(three, order):
    parts = three.call("used_records", order)
    steps = [[record for part in step for record in part] for step in zip(*parts, strict=True)]
    for own, step in zip(zip(*parts, strict=True), steps, strict=True):
        assert len(set(step)) == len(step)
        sizes = [len(part) for part in own]
        assert max(sizes) - min(sizes) <= 1
        if order != "poisson":
            assert len(step) == (RECORDS if order == "full" else BATCH)
    if order in ("cyclic", "shuffled_once", "reshuffled"):
        for epoch in (steps[:3], steps[3:]):
            assert sorted(record for step in epoch for record in step) == list(range(RECORDS))
    epochs = [list(map(sorted, steps[:3])), list(map(sorted, steps[3:]))]
    if order != "full":
        assert (epochs[0] == epochs[1]) == (order in ("cyclic", "shuffled_once"))
        again = three.call("used_records", order)
        assert (again == parts) == (order == "cyclic")  # another run has another secret order


def test_poisson_batches_of_a_stock_engine(two):
    for epsilon, event in two.call("stock_epsilon"):
        assert event.sampling_probability == drawn_rate(BATCH / RECORDS)
        assert (event.batch_order.value, event.batch_size, event.num_steps) == ("poisson", BATCH, 3)
        accountant = hsa.LastIterateAccountant().compose(event)
        assert epsilon == accountant.get_epsilon(1e-5)


@pytest.mark.parametrize("declared", [None, {"batch_order": "cyclic", "dataset_size": RECORDS}])
def test_other_batches_of_a_stock_engine_are_half_of_those_of_a_step(two, declared):
    for outcome in two.call("stock_run", False, declared):
        assert "Expected one process, got 2 with DataLoader" in outcome


# --- one process does something else -------------------------------------------------------------


def same_text(outcomes):
    texts = {text for text, _ in outcomes}
    assert len(texts) == 1, texts
    return texts.pop()


@pytest.mark.parametrize(
    ("misuse", "arguments", "text"),
    [
        ("skips_a_step", (), "Process 1 of 2 refused: step 2: a piece of a batch was delivered|"
         "Process 1 of 2 refused: step 2 used batch 2, expected batch 1"),
        ("refuses_a_step", (0,), "Process 0 of 2 refused: .*not what the loader drew"),
        ("refuses_a_piece", (), "Process 1 of 2 refused: .*not what the loader drew"),
        ("changes_the_rate", (), "different steps: process 0 has step 2.*'lr': 0.5.*process 1 has "
         "step 2.*'lr': 0.25"),
        ("writes_a_parameter", (), "Process 1 of 2 refused: step 2: the parameters were"),
    ],
)  # fmt: skip
def test_what_one_process_refuses_ends_the_run_in_all(two, misuse, arguments, text):
    outcomes = two.call(misuse, *arguments)
    assert re.search(text, same_text(outcomes)), outcomes
    assert not any(has_epsilon for _, has_epsilon in outcomes)


def test_a_step_that_all_know_to_be_none_ends_nothing(two):
    outcomes = two.call("takes_one_step_too_many")
    assert "num_steps" in same_text(outcomes)
    assert all(has_epsilon for _, has_epsilon in outcomes)


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
        ({}, {"max_grad_norm": -1.0}, ""),
    ],
)
def test_a_process_with_another_program_is_refused(two, options, others, name):
    outcomes = two.call("starts_with", options, others)
    if name:
        assert same_text([(text, 0) for text in outcomes])
        assert f"Expected the same {name}" in outcomes[0], outcomes
        assert "process 1" in outcomes[0]
    else:
        assert "Process 1 of 2 refused: Expected" in outcomes[0]
        assert outcomes[1].startswith("ValueError")


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
    whole = processes.Training(batch_order=processes.SEEDED.get(order, order)).epochs(1)
    for files, weights in two.call("resumes", str(tmp_path), order):
        assert files == [True, False]
        assert weights == pytest.approx(whole.weights, abs=1e-6)


def test_processes_that_load_different_checkpoints(two, tmp_path):
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
