"""torch's gloo between two processes: one all-reduce of all gradients in one buffer, as DDP makes it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers.gradients import calls_for as calls_for
from benchmarks.peers.gradients import count_and_bytes
from benchmarks.peers.work import REPLICAS


def _rank(job: str, rank: int, port: int) -> Callable[[], Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=REPLICAS)
    count, size = count_and_bytes(job)
    weights, targets = torch.zeros(count * size // 4), torch.ones(count * size // 4)

    def one() -> Any:
        gradients = weights - targets
        dist.all_reduce(gradients)
        return weights.sub_(gradients, alpha=0.1)

    return one


def prepare(job: str) -> tuple[Callable[[int], Any], Callable[[Any], float]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    other = [sys.executable, "-m", "benchmarks.peers.gradients_torch", job, str(port)]
    subprocess.Popen(other, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.PIPE)
    one = _rank(job, 0, port)
    return lambda _: one(), lambda weights: float(weights[0])


if __name__ == "__main__":
    follow = _rank(sys.argv[1], 1, int(sys.argv[2]))
    try:
        while True:  # rank 1 does what rank 0 does, until rank 0 is gone
            follow()
    except RuntimeError:
        pass
