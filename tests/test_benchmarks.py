"""The benchmarks run, from the first line to the table. What they find out depends on the machine and is not for a test."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import __main__ as together
from benchmarks import _measure, import_time

REPOSITORY = Path(__file__).parents[1]

SMALL = {
    "step_overhead": "--rounds 1 --devices 2 --variables 2",
    "allreduce": "--rounds 1 --devices 2 --jobs 3x256",
    "central_storage": "--rounds 1 --replicas 2 --models 1x8 --rows 2",
    "steps_per_run": "--rounds 1 --devices 1 --steps 2",
    "zero1": "--rounds 1 --devices 2 --width 16",
    "input_keeps_up": "--rounds 1 --models mlp --rows 4",
    "checkpoint_stall": "--rounds 1 --trees 2x64 --products 1 --directory",
    "keras_fit": "--rounds 1 --models tiny",
    "against_peers": "--rounds 1 --workloads a --peers=",
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning:keras.*")  # of Keras's own DataParallel
@pytest.mark.parametrize("name", SMALL)
def test_a_benchmark_runs(name, capsys, tmp_path):
    options = SMALL[name].split() + ([str(tmp_path)] if SMALL[name].endswith("--directory") else [])

    importlib.import_module(f"benchmarks.{name}").main(options)

    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert table[0].rstrip("| ").endswith("claim")
    assert len(table) > 2


def test_the_import_is_measured_against_that_of_jax(monkeypatch, capsys):
    monkeypatch.setattr(import_time, "once", {"jax": 1.0, "replicax": 1.25}.__getitem__)

    import_time.main(["--rounds", "3"])

    assert "0.250 (0.250–0.250) | ≤ 0.15 not held |\n" in capsys.readouterr().out


def test_every_benchmark_is_on_the_list_and_tried():
    scripts = {path.stem for path in (REPOSITORY / "benchmarks").glob("*.py") if not path.stem.startswith("_")}
    page = (REPOSITORY / "benchmarks" / "README.md").read_text()

    assert scripts == {*SMALL, "import_time", "against_tf", "against_torch_ddp"}
    assert [name for name in scripts if f"`{name}.py`" not in page] == []


def test_a_ratio_is_the_median_of_the_rounds_and_a_claim_judges_it():
    ratio = _measure.Ratio.between([2.0, 3.0, 4.0, 5.0, 60.0], [2.0, 2.0, 2.0, 2.0, 2.0])

    assert (ratio.low, ratio.value, ratio.high) == (1.5, 2.0, 2.5)
    assert str(ratio) == "2.00 (1.50–2.50)"
    assert _measure.at_most(2.0).held(ratio.value) and not _measure.at_least(2.1).held(ratio.value)


def test_ways_take_turns_and_each_second_round_goes_backwards():
    seen = []
    timers = {name: lambda name=name: seen.append(name) or 1.0 for name in "abc"}

    times = _measure.in_turns(timers, rounds=2, warm_up=1)

    assert "".join(seen) == "cba" + "abc" + "cba"
    assert times == {"a": [1.0, 1.0], "b": [1.0, 1.0], "c": [1.0, 1.0]}


def test_the_summary_has_a_line_for_each_benchmark(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "one", "three", "--rounds", "2"])
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: _Finished(command))

    together.main()

    assert capsys.readouterr().out.endswith("\n\none    claims held: 1 of 2\nthree  failed with exit status 1\n")


class _Finished:
    """A benchmark that is over; that of `three` failed."""

    def __init__(self, command):
        assert command[-2:] == ["--rounds", "2"]
        self.failed = command[2] == "benchmarks.three"
        self.stdout = ["| a table |\n"] if self.failed else ["| a table |\n", "claims held: 1 of 2\n"]

    def wait(self):
        return int(self.failed)
