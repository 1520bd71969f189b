"""The tracked files would be as true on any other machine."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]

# One letter of each name is written as a class of its own, so that this file does not find itself.
HOSTS = re.compile(r"py[p]i\.(org|io)|python[h]osted|npm[j]s\.(org|com)|arti[f]actory|ana[c]onda\.org", re.IGNORECASE)
INDEX_OPTIONS = re.compile(r"--(extra-)?[i]ndex-url|--[f]ind-links|--[t]rusted-host")
MACHINE_PATHS = re.compile(r"(?<![\w.:/~$}-])/(home|root|work|opt|mnt|srv|Users)/\w|[A-Z]:\\Users\\")


def tracked() -> list[str]:
    git = subprocess.run(["git", "ls-files", "-z"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return [name for name in git.stdout.split("\0") if name and (REPOSITORY / name).is_file()]


@pytest.mark.parametrize("pattern", [HOSTS, INDEX_OPTIONS, MACHINE_PATHS], ids=["hosts", "index-options", "paths"])
def test_no_file_names_a_registry_or_a_machine(pattern):
    found = [
        f"{name}:{number}: {line.strip()[:120]}"
        for name in tracked()
        for number, line in enumerate(_lines(REPOSITORY / name), start=1)
        if pattern.search(line)
    ]

    assert found == []


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (HOSTS, "see https://py|pi.org/simple"),
        (INDEX_OPTIONS, "pip install --extra-index|-url x"),
        (MACHINE_PATHS, "cd /ho|me/somebody/project"),
        (MACHINE_PATHS, 'path = "/wo|rk/main"'),
    ],
)
def test_the_patterns_find_what_they_are_for(pattern, line):
    assert pattern.search(line.replace("|", ""))


def test_constraints_are_names_and_versions_only():
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()

    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.!+]+", line)] == []
    assert lines == sorted(lines, key=str.lower)


def test_everything_that_make_installs_is_pinned():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    asked = project["dependencies"] + sum(project["optional-dependencies"].values(), [])
    pinned = {_normal(line.split("==")[0]) for line in (REPOSITORY / "constraints.txt").read_text().splitlines()}

    names = {_normal(re.split(r"[\[<>=!~; ]", requirement)[0]) for requirement in asked} - {"replicax"}
    assert sorted(names - pinned) == []


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:  # a picture
        return []
