"""How much does `import replicax` add to `import jax`? Fresh processes, interleaved."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys

PROGRAM = """
import time
begun = time.perf_counter()
import {module}
print(time.perf_counter() - begun)
"""


def once(module: str) -> float:
    out = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(module=module)], capture_output=True, text=True, check=True
    )
    return float(out.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    pairs = [(once("jax"), once("replicax")) for _ in range(rounds)]
    jax, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
    added = statistics.median(b - a for a, b in pairs)
    print(f"import jax {jax:.3f} s, import replicax {ours:.3f} s, added {added:.3f} s (ratio {ours / jax:.2f})")


if __name__ == "__main__":
    main()
