"""The examples in docstrings, README and guides run."""

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import replicax
from tests.fresh import python

REPOSITORY = Path(__file__).parents[1]
MODULES = ["replicax"] + [
    module.name for module in pkgutil.walk_packages(replicax.__path__, "replicax.") if "__main__" not in module.name
]
PAGES = sorted(path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "docs").rglob("*.md"))


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name):
    """Floats are compared as printed; write the example so that it prints few digits."""
    result = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)

    assert result.failed == 0


@pytest.mark.parametrize("page", PAGES)
def test_interactive_examples_in_the_docs_run(page):
    result = doctest.testfile(
        str(REPOSITORY / page), module_relative=False, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )

    assert result.failed == 0


@pytest.mark.processes
def test_the_site_builds_without_a_broken_link(tmp_path):
    # Without `--quiet`, which would hide warnings from `--strict` as well.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]

    built = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)

    assert built.returncode == 0, built.stdout + built.stderr
    assert 'id="replicax.MirroredStrategy"' in (tmp_path / "api" / "index.html").read_text()


def test_the_loop_in_the_readme_runs():
    (program,) = re.findall(r"```python\n(.*?)```", (REPOSITORY / "README.md").read_text(), flags=re.DOTALL)

    loss = float(python(program))

    assert 0 < loss < 2.5
