"""How much does `import replicax` add to `import jax`? Fresh processes, in turns.

Bytecode is written on the first round, as with any package that Python has imported before.

    python -m benchmarks.import_time [--rounds 15]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence

from benchmarks._measure import ROOT, Ratio, Report, at_most, median_of

PROGRAM = """
import time
begun = time.perf_counter()
import {module}
print(time.perf_counter() - begun)
"""


def once(module: str) -> float:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    out = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(module=module)],
        capture_output=True, text=True, check=True, cwd=ROOT, env=environment,
    )  # fmt: skip
    return float(out.stdout)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args(argv).rounds
    pairs = [(once("jax"), once("replicax")) for _ in range(rounds + 1)][1:]
    jax, ours = zip(*pairs, strict=True)
    report = Report(f"Seconds of an import, {rounds} rounds", "import jax", "import replicax", ratio="added, s")
    added = Ratio.of([b - a for a, b in pairs])
    report.add(median_of(jax, "s"), median_of(ours, "s"), ratio=added, claim=at_most(0.15))
    report.show()


if __name__ == "__main__":
    main()
