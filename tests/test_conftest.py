"""The checks that every test runs under notice what they are there for."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

pytest_plugins = ["pytester"]

LEAKS = """
import os, threading
from replicax import _context

def test_clean():
    pass

def test_thread():
    threading.Thread(target=threading.Event().wait, name="left-running", daemon=True).start()

def test_variable():
    os.environ["LEFT_SET"] = "1"

def test_file():
    open("left.txt", "w").close()

def test_strategy():
    _context.thread.modes.append("left-entered")

def test_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    open("fine.txt", "w").close()
"""


@pytest.mark.processes
def test_what_a_test_leaves_behind_fails_it_and_only_it(pytester):
    pytester.makeconftest(Path(__file__).with_name("conftest.py").read_text())
    pytester.makepyfile(LEAKS)

    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", timeout=120)

    result.assert_outcomes(passed=6, errors=4)
    result.stdout.fnmatch_lines_random(
        [
            "*AssertionError: threads still running after the test: ?'left-running'?",
            "*AssertionError: environment variables changed by the test: ?'LEFT_SET'?",
            "*AssertionError: files left in *: ?'left.txt'?",
            "*AssertionError: still entered after the test: *left-entered*",
        ]
    )


def test_compilations_names_what_is_compiled_and_nothing_on_the_second_call(compilations):
    triple = jax.jit(lambda x: x * 3)
    x = jnp.ones(3)

    with compilations() as first:
        triple(x)
    with compilations() as second:
        triple(x)

    assert first == ["jit(<lambda>)"]
    assert second == []
