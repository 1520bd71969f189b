"""One peer in a process of its own: ``python -m benchmarks.peers.member PEER WORKLOAD``.

Reads commands from standard input and answers on standard output: ``losses`` trains twenty steps from the start and tells
the first and the last loss (every peer must give the same), ``time`` runs one round and tells the seconds per step.
"""

from __future__ import annotations

import importlib
import json
import sys
import time

from benchmarks.peers.work import WORK

CHECKED_STEPS = 20


def main() -> None:
    peer, workload = sys.argv[1:3]
    answers = sys.stdout
    sys.stdout = sys.stderr  # libraries print where they like; only answers may reach the driver
    module = importlib.import_module(f"benchmarks.peers.{peer}")
    step, read = module.prepare(workload)
    calls = module.calls_for(workload) if hasattr(module, "calls_for") else WORK[workload].steps
    number = 0
    for command in sys.stdin:
        if command.strip() == "losses":
            losses = [read(step(i)) for i in range(CHECKED_STEPS)]
            number = CHECKED_STEPS
            answer = {"first": losses[0], "last": losses[-1]}
        else:
            begun = time.perf_counter()
            for _ in range(calls):
                out = step(number)
                number += 1
            read(out)
            answer = {"seconds": (time.perf_counter() - begun) / calls}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
