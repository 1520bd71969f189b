"""Is training with replicax as fast as by hand, and as with what people use instead?

Each peer trains the same workload from the same weights on the same batches, in a process of its own, set up as its users
set it up. Rounds are interleaved: in each, every peer runs some steps while the others stand idle. Printed is the median
time per step and its ratio to ours (above 1: ours is faster).

    python -m benchmarks.against_peers --workloads a,b,c --peers raw_jax,pmap,keras_dp --rounds 9
    python -m benchmarks.against_peers --peers tf_mirrored --python .bench-venv/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
ELSEWHERE = ("tf_mirrored", "torch_ddp")
"""Peers that live in the benchmark environment."""


class Member:
    """A peer's process, asked one thing at a time."""

    def __init__(self, peer: str, workload: str, python: str) -> None:
        self.peer = peer
        self.seconds: list[float] = []
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.peers.member", peer, workload],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
            env={key: value for key, value in os.environ.items() if key not in ("NPROC", "XLA_FLAGS")},
        )  # fmt: skip

    def ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout and self._process.stderr
        try:
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            raise SystemExit(f"{self.peer} ended:\n{self._process.stderr.read()[-2000:]}") from None

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)


def compare(workload: str, peers: list[str], rounds: int, python: str) -> Table:
    """One workload: every peer's time per step, interleaved."""
    members = [Member(p, workload, python if p in ELSEWHERE else sys.executable) for p in ["ours", *peers]]
    try:
        losses = {member.peer: member.ask("losses") for member in members}
        for number in range(rounds + 1):
            for member in members:
                seconds = member.ask("time")["seconds"]
                if number:  # the first round warms up
                    member.seconds.append(seconds)
    finally:
        for member in members:
            member.close()
    ours = members[0]
    table = Table(title=f"workload {workload}, {rounds} rounds")
    for column in ("peer", "ms per step", "spread", "ratio to ours", "loss after 20 steps"):
        table.add_column(column, justify="left" if column == "peer" else "right")
    for member in members:
        median = statistics.median(member.seconds)
        ratio = statistics.median(b / a for a, b in zip(ours.seconds, member.seconds, strict=True))
        spread = (max(member.seconds) - min(member.seconds)) / median
        table.add_row(
            member.peer, f"{median * 1e3:.3f}", f"{spread:.0%}", f"{ratio:.2f}", f"{losses[member.peer]['last']:.5f}"
        )
    return table


def main(peers: str = "raw_jax,pmap,keras_dp") -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default="a,b,c,d,e")
    parser.add_argument("--peers", default=peers)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--python", default=str(ROOT / ".bench-venv/bin/python"), help="where TensorFlow and torch live"
    )
    asked = parser.parse_args()
    for workload in asked.workloads.split(","):
        Console().print(compare(workload, asked.peers.split(","), asked.rounds, asked.python))


if __name__ == "__main__":
    main()
