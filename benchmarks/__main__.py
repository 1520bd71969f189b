"""Runs several benchmarks, each in a process of its own, and says in the end which claims held.

python -m benchmarks [step_overhead allreduce import_time]
"""

from __future__ import annotations

import itertools
import subprocess
import sys

from benchmarks._measure import ROOT

MAIN = ("step_overhead", "allreduce", "import_time")


def main() -> None:
    names = list(itertools.takewhile(lambda word: not word.startswith("-"), sys.argv[1:]))
    options = sys.argv[1 + len(names) :]
    verdicts = {name: run(name, options) for name in names or MAIN}
    print()
    width = max(map(len, verdicts))
    for name, verdict in verdicts.items():
        print(f"{name:{width}}  {verdict}")


def run(name: str, options: list[str]) -> str:
    """The last line that says how many claims held."""
    print(f"== {name}", flush=True)
    process = subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{name}", *options], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    verdict = "no claims"
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        if line.startswith("claims held"):
            verdict = line.strip()
    status = process.wait()
    return f"failed with exit status {status}" if status else verdict


if __name__ == "__main__":
    main()
