"""tools/environment.py, which the Makefile calls: with an environment whose pip is a script."""

import fcntl
import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tools" / "environment.py"
SPEC = importlib.util.spec_from_file_location("environment", PROGRAM)
environment = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(environment)

# "python" of the environment: real but for "-m pip install", which writes down its arguments.
PYTHON = """#!/bin/sh
if [ "$1 $2 $3" = "-m pip --version" ]; then exit 0; fi
if [ "$1 $2 $3" = "-m pip install" ]; then
    cat {lock} >{folder}/lock-during
    echo "$@" >{folder}/arguments
    {end}
fi
exec {python} "$@"
"""


@pytest.fixture
def make_environment(tmp_path):
    """An environment whose pip ends as `end` says; a function that installs into it."""

    def make(end="exit 0"):
        folder = tmp_path / "env"
        (folder / "bin").mkdir(parents=True)
        (folder / ".test-installed").touch()
        script = folder / "bin" / "python"
        lock = f"{folder}.lock"
        script.write_text(PYTHON.format(lock=lock, folder=tmp_path, end=end, python=sys.executable))
        script.chmod(0o755)
        return folder

    return make


def command(folder):
    return [sys.executable, PROGRAM, "python3.x", folder, "constraints.txt", "--quiet", "-e", "."]


def install(folder):
    return subprocess.run(command(folder), capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("end", "status", "finished"),
    [("exit 0", 0, True), ("exit 1", 1, True), ("kill -9 $$", 137, False)],
)
def test_an_installation(make_environment, tmp_path, end, status, finished):
    folder = make_environment(end)
    result = install(folder)
    assert result.returncode == status
    constraints = "constraints.txt" if sys.version_info < (3, 13) else "constraints-numpy2.txt"
    arguments = f"-m pip install --disable-pip-version-check -c {constraints} --quiet -e .\n"
    assert (tmp_path / "arguments").read_text() == arguments
    assert result.stdout == f"{folder}/bin/python {arguments}"
    assert not list(folder.glob(".*-installed"))
    assert (tmp_path / "lock-during").read_text() == "unfinished\n"
    assert (pathlib.Path(f"{folder}.lock").read_text() == "") is finished


def test_an_unfinished_environment_is_made_anew(make_environment, tmp_path, monkeypatch):
    folder = make_environment()
    pathlib.Path(f"{folder}.lock").write_text("unfinished\n")
    made = []
    real = subprocess.call

    def call(command, **kwargs):
        if "venv" not in command:
            return real(command, **kwargs)
        made.append(command)
        return 0

    monkeypatch.setattr(environment.subprocess, "call", call)
    for _ in range(2):
        assert environment.install("python3.x", str(folder), "constraints.txt", ["-e", "."]) == 0
    assert made == [[sys.executable, "-m", "venv", "--clear", str(folder)]]


def test_one_installation_at_a_time(make_environment):
    folder = make_environment()
    with open(f"{folder}.lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = subprocess.Popen(command(folder), stdout=subprocess.PIPE, text=True)
        assert waiting.stdout.readline() == f"Waiting for another installation into {folder}\n"
        assert (folder / ".test-installed").exists()
    assert waiting.wait(timeout=300) == 0


@pytest.mark.parametrize("version", [(2, 7, 18), (3, 9, 20), (3, 14, 0)])
def test_other_pythons(monkeypatch, version):
    monkeypatch.setattr(environment.sys, "version_info", version)
    text = "python3.x is Python {}.{}, but Python 3.10 to 3.13 is needed".format(*version)
    with pytest.raises(SystemExit, match=text):
        environment.check_python("python3.x")
    monkeypatch.undo()
    environment.check_python("python3.x")  # this one will do


def test_the_makefile_calls_it(make_environment, tmp_path):
    """What make would run; a Python that does not run is said to be one."""
    variables = {**os.environ, "MAKEFLAGS": "", "PIP_ARGS": "--pre -q"}
    dry = ["make", "-n", "-B", "-C", str(ROOT), ".venv-numpy2/.test-installed"]
    try:
        text = subprocess.run(
            [*dry, "PYTHON=python3.x"], env=variables, capture_output=True, text=True, check=True
        ).stdout
    except FileNotFoundError:
        pytest.skip("no make")
    assert (
        "'python3.x' tools/environment.py 'python3.x' .venv-numpy2 constraints-numpy2.txt "
        "--pre -q -e '.[cli,opacus,dev]' scikit-learn\n"
    ) in text
    (tmp_path / "tools").mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "constraints-numpy2.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    missing = subprocess.run(
        ["make", "PYTHON=python3.x", ".venv/.demo-installed"],
        cwd=tmp_path, env=variables, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert missing.returncode == 2
    assert "python3.x does not run. Install Python 3.10 to 3.13" in missing.stderr
