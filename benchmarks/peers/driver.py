"""A peer's process, asked one thing at a time."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

from benchmarks._measure import ROOT

SETTINGS = ("NPROC", "XLA_FLAGS", "REPLICAX_HOST_TUNING", "REPLICAX_NPROC")
"""What the driver's own process may run with, and a peer as its users run it does not."""


class Member:
    """One peer on one workload: see `member`."""

    def __init__(self, peer: str, workload: str, python: str) -> None:
        self.peer = peer
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.peers.member", peer, workload],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
            env={key: value for key, value in os.environ.items() if key not in SETTINGS},
        )  # fmt: skip

    def ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin and self._process.stdout and self._process.stderr
        try:
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())
        except (BrokenPipeError, json.JSONDecodeError):
            raise SystemExit(f"{self.peer} ended:\n{self._process.stderr.read()[-2000:]}") from None

    def seconds(self) -> float:
        """The seconds of a step, of one round."""
        return self.ask("time")["seconds"]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(10)
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert stream is not None
            stream.close()
