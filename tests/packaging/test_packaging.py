"""What is installed, what importing it costs, and how the Makefile makes an environment."""

import ast
import fcntl
import importlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest

import hidden_state_accountants as hsa

ROOT = pathlib.Path(__file__).resolve().parents[2]
PACKAGES = {"hidden_state_accountants", "hidden_state_adapters"}
FRAMEWORKS = {"opacus", "tensorflow", "tensorflow_privacy", "torch"}
EXTRAS = {"matplotlib", "rich", "sklearn", "typer"}

IMPORT = """
import json, sys, time
import dp_accounting
upstream = time.process_time()  # of this process only, however busy the machine is
before = set(sys.modules)
from {package} import *  # a bare import imports nothing yet
end = time.process_time()
modules = sorted({{name.partition(".")[0] for name in set(sys.modules) - before}})
print(json.dumps({{"seconds": end - upstream, "modules": modules}}))
"""


def run(*command, cwd):
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def import_in_new_process(package, cwd):
    # The last line: what is imported may print a warning of its own.
    output = run(sys.executable, "-c", IMPORT.format(package=package), cwd=cwd)
    return json.loads(output.splitlines()[-1])


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_import_loads_no_framework_and_no_extra_and_takes_under_a_second(package, tmp_path):
    runs = [import_in_new_process(package, tmp_path) for _ in range(2)]
    loaded = set(runs[0]["modules"])
    assert package in loaded
    assert not loaded & (FRAMEWORKS | EXTRAS)
    assert min(run["seconds"] for run in runs) < 1.0, runs


def test_import_of_the_package_imports_nothing_yet(tmp_path):
    # In a process of its own: here everything is imported already.
    code = (
        "import sys, hidden_state_accountants as hsa; before = set(sys.modules); "
        "assert set(hsa.__all__) <= set(dir(hsa)); import hidden_state_accountants.comparing; "
        "assert callable(hsa.compare) and hsa.comparing.compare is hsa.compare; "
        "names = {}; exec('from hidden_state_accountants import *', names); "
        "assert set(hsa.__all__) <= set(names); "
        "print(sorted({'absl', 'dp_accounting', 'numpy', 'scipy'} & before))"
    )
    assert run(sys.executable, "-c", code, cwd=tmp_path).splitlines()[-1] == "[]"


def test_type_checkers_read_the_same_names():
    stub = pathlib.Path(hsa.__file__).with_suffix(".pyi").read_text("utf-8")
    imports = [node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom)]
    assert hsa._MODULES == {a.name: node.module for node in imports for a in node.names}


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="no attribute 'compair'"):
        _ = hsa.compair


@pytest.mark.slow
def test_the_wheel_and_the_sdist_hold_what_they_should(tmp_path):
    """The sdist needs build tools; nothing is written into the checkout."""
    if all(importlib.util.find_spec(tool) for tool in ("build", "hatchling")):
        # Builds the sdist, and the wheel from the sdist.
        arguments = ["build", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    else:
        arguments = ["pip", "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)]
    run(sys.executable, "-m", *arguments, cwd=tmp_path)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    top_level = {name.partition("/")[0] for name in names}
    assert {name for name in top_level if not name.endswith(".dist-info")} == PACKAGES
    assert {f"{package}/py.typed" for package in PACKAGES} <= names
    assert any(re.search(r"\.dist-info/.*LICENSE$", name) for name in names)
    parents = {"hidden_state_accountants": ROOT, "hidden_state_adapters": ROOT / "adapters"}
    assert {name for name in names if name.endswith((".py", ".pyi"))} == {
        path.relative_to(parent).as_posix()
        for package, parent in parents.items()
        for path in (parent / package).rglob("*.py*")
        if path.suffix in (".py", ".pyi")
    }
    for sdist in tmp_path.glob("*.tar.gz"):
        with tarfile.open(sdist) as archive:
            names = {name.partition("/")[2] for name in archive.getnames()}
        assert {"pyproject.toml", "LICENSE", "Makefile", "constraints.txt"} <= names
        assert {"tools/environment.py", "tests/packaging/test_packaging.py"} <= names
        assert "adapters/hidden_state_adapters/py.typed" in names


def test_scripts_and_tests_are_no_packages():
    """A test folder that is a package, "opacus" for one, would shadow the library."""
    for folder in ("tests", "examples", "benchmarks"):
        assert not list((ROOT / folder).rglob("__init__.py"))


def test_the_conda_recipe_asks_for_the_same_versions():
    tomllib = pytest.importorskip("tomllib")
    recipe = (ROOT / "conda" / "recipe.yaml").read_text("utf-8")
    pins = dict(re.findall(r"^    - ([\w-]+) ([<>=\d.,]+)$", recipe, re.M))
    pins["torch"] = pins.pop("pytorch")  # its name there
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    extras = project["project"]["optional-dependencies"]
    asked = [
        *project["build-system"]["requires"],
        f"python{project['project']['requires-python']}",
        *project["project"]["dependencies"],
        *(line for name in ("keras3", "opacus", "sklearn") for line in extras[name]),
    ]
    expected = dict(re.match(r"([\w-]+)(.+)", line).groups() for line in asked)
    expected.pop("tensorflow")  # channels have other builds of it
    assert pins == expected


def test_both_constraints_files_pin_the_same_tools():
    def pins(name):
        tools = (ROOT / name).read_text().partition("# Tools")[2].splitlines()[1:]
        return {line.partition(" ")[0] for line in tools}

    assert pins("constraints.txt") == pins("constraints-numpy2.txt")
    assert any(pin.startswith("pytest==") for pin in pins("constraints.txt"))


@pytest.mark.parametrize(
    ("framework", "missing"), [("opacus", "opacus"), ("opacus", "torch"), ("sklearn", "sklearn")]
)
def test_an_adapter_without_its_framework_says_what_to_install(framework, missing, tmp_path):
    script = f"""
import sys
sys.modules[{missing!r}] = None
try:
    import hidden_state_adapters.{framework}
except ImportError as error:
    print(error)
"""
    text = run(sys.executable, "-c", script, cwd=tmp_path)
    assert "is missing" in text
    assert f"hidden-state-accountants[{framework}]" in text


def test_all_files_name_one_version(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "tools")
    release = importlib.import_module("release")
    assert release.version(ROOT) == hsa.__version__
    for file in release.VERSIONS:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text((ROOT / file).read_text("utf-8"), "utf-8")
    (tmp_path / "CHANGELOG.md").write_text("## [Unreleased]\n", "utf-8")
    with pytest.raises(SystemExit, match=re.escape("none in CHANGELOG.md")):
        release.version(tmp_path)


def test_the_description_of_a_release_has_no_relative_links(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    release = importlib.import_module("release")
    readme = (ROOT / "README.md").read_text("utf-8")
    assert release.RELATIVE_LINK.search(readme)
    for url in ("", "https://example.org/us/it"):
        text = release.description(readme, url, "abc")
        assert not release.RELATIVE_LINK.search(text)
        assert (f"({url}/blob/abc/docs/theory/theorem_a.md)" in text) == bool(url)
        assert "theorem_a" not in text or url


# --- tools/environment.py, with an environment whose pip is a script ------------------------------

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
    """An environment whose pip ends as `end` says."""

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


@pytest.mark.parametrize(
    ("end", "status", "finished"),
    [("exit 0", 0, True), ("exit 1", 1, True), ("kill -9 $$", 137, False)],
)
def test_an_installation(make_environment, tmp_path, end, status, finished):
    folder = make_environment(end)
    result = subprocess.run(command(folder), capture_output=True, text=True, check=False)
    assert result.returncode == status
    constraints = "constraints.txt" if sys.version_info < (3, 13) else "constraints-numpy2.txt"
    arguments = f"-m pip install --disable-pip-version-check -c {constraints} --quiet -e .\n"
    assert (tmp_path / "arguments").read_text() == arguments
    assert result.stdout == f"{folder}/bin/python {arguments}"
    assert not list(folder.glob(".*-installed"))
    assert (tmp_path / "lock-during").read_text() == "unfinished\n"
    assert (pathlib.Path(f"{folder}.lock").read_text() == "") is finished


def test_an_unfinished_environment_is_made_anew(make_environment, monkeypatch):
    folder = make_environment()
    pathlib.Path(f"{folder}.lock").write_text("unfinished\n")
    made, real = [], subprocess.call

    def call(command, **kwargs):
        is_made = "venv" in command
        made.extend([command] * is_made)
        return 0 if is_made else real(command, **kwargs)

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


def test_the_makefile_says_which_python_does_not_run(tmp_path):
    if not shutil.which("make"):
        pytest.skip("no make")
    variables = {**os.environ, "MAKEFLAGS": ""}
    (tmp_path / "tools").mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt", "constraints-numpy2.txt"):
        (tmp_path / name).symlink_to(ROOT / name)
    missing = subprocess.run(
        ["make", "PYTHON=python3.x", ".venv/.demo-installed"],
        cwd=tmp_path, env=variables, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert missing.returncode == 2
    assert "python3.x does not run. Install Python 3.10 to 3.13" in missing.stderr
