"""Builds the source distribution and the wheel of the last commit: make release.

    python tools/release.py [--url https://HOST/OWNER/REPOSITORY] [--out dist]

It is built twice from clean copies of the commit, with the commit's time as the time of every file:
equal sources give equal files, byte by byte. With --url the project's URLs are entered and the
README's links, which lead to files of the repository, become absolute; without it they become plain
text, since an index of packages shows the README far from these files.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
RELATIVE_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)\s]+)\)")


# Where a release says which one it is.
VERSIONS = {
    "pyproject.toml": r'^version = "(.+)"$',
    "CITATION.cff": r"^version: (.+)$",
    "conda/recipe.yaml": r'^  version: "(.+)"$',
    "hidden_state_accountants/__init__.py": r'^__version__ = "(.+)"$',
    "CHANGELOG.md": r"^## \[(\d.*)\] - \d{4}-\d\d-\d\d$",
}


def version(root: Path) -> str:
    """The version that all files name; the changelog's is its first with a date."""
    found = {}
    for file, pattern in VERSIONS.items():
        named = re.search(pattern, (root / file).read_text("utf-8"), re.MULTILINE)
        found[file] = named[1] if named else "none"
    if len(set(found.values())) > 1:
        named = ", ".join(f"{name} in {file}" for file, name in found.items())
        raise SystemExit(f"Expected one version, got {named}.")
    return found["pyproject.toml"]


def output(*command: str, **environment: str) -> str:
    """What a command prints; its errors go to the terminal."""
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE, check=True
    )
    return done.stdout.decode()


def description(readme: str, url: str, revision: str) -> str:
    """The README with links that lead somewhere from anywhere."""
    if not url:
        return RELATIVE_LINK.sub(lambda match: match[1], readme)
    return RELATIVE_LINK.sub(
        lambda match: f"[{match[1]}]({url}/blob/{revision}/{match[2]})", readme
    )


def urls(url: str) -> str:
    """The table of pyproject.toml."""
    lines = {
        "Homepage": url,
        "Source": url,
        "Issues": f"{url}/issues",
        "Changelog": f"{url}/blob/main/CHANGELOG.md",
    }
    table = "".join(f'{name} = "{address}"\n' for name, address in lines.items())
    return f"\n[project.urls]\n{table}"


def copy(folder: Path, url: str, revision: str) -> None:
    """The commit's files, with the description and the URLs of a release."""
    archive = folder / "source.tar"
    output("git", "archive", "--output", str(archive), revision)
    shutil.unpack_archive(archive, folder, filter="data")
    archive.unlink()
    readme, project = folder / "README.md", folder / "pyproject.toml"
    readme.write_text(description(readme.read_text("utf-8"), url, revision), "utf-8")
    if url:
        text = project.read_text("utf-8").replace(
            "\n[project.scripts]", f"{urls(url)}\n[project.scripts]"
        )
        project.write_text(text, "utf-8")


def build(out: Path, url: str, revision: str) -> dict[str, str]:
    """Builds into `out`; names of files and their hashes."""
    time = output("git", "show", "--no-patch", "--format=%ct", revision).strip()
    with tempfile.TemporaryDirectory() as name:
        copy(Path(name), url, revision)
        output(sys.executable, "-m", "build", "--outdir", str(out), name, SOURCE_DATE_EPOCH=time)
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(out.iterdir())}


def main() -> None:
    """Builds, compares, checks, and says what is there."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--url", default="", help="where the repository is published")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    if output("git", "status", "--porcelain"):
        sys.exit("There are changes that are not committed. A release is built from a commit.")
    number, revision = version(ROOT), output("git", "rev-parse", "HEAD").strip()
    shutil.rmtree(options.out, ignore_errors=True)
    hashes = build(options.out, options.url.rstrip("/"), revision)
    with tempfile.TemporaryDirectory() as name:
        if build(Path(name), options.url.rstrip("/"), revision) != hashes:
            sys.exit("Two builds of one commit differ.")
    files = [str(options.out / name) for name in hashes]
    if subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *files]).returncode:
        sys.exit("twine does not take them.")
    print(f"version {number}, commit {revision}")
    for name, digest in hashes.items():
        print(f"{digest}  {name}")


if __name__ == "__main__":
    main()
