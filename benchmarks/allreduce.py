"""Does packing small gradients and leaving large ones alone pay? Our all-reduce, by size and by count.

The step computes gradients of no depth, weight minus target, adds them up over the replicas and updates the weights.
(Computed in the step, as any gradients are: XLA treats arguments otherwise.) Beside ours stand one `lax.psum` of the whole
list, everything packed into one buffer by hand, and every array reduced in two halves (reduce-scatter, all-gather).
With `--peers` also TensorFlow's MirroredStrategy and torch's gloo between two processes, from the benchmark environment.

    python -m benchmarks.allreduce [--rounds 15] [--devices 2,4] [--jobs 200x256,1x1M]
    python -m benchmarks.allreduce --devices 2 --peers tf,torch
    python -m benchmarks.allreduce --untuned             # the allocator as the system has it
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import replicax as rx
from benchmarks._measure import (
    BENCH_PYTHON,
    Ratio,
    Report,
    Times,
    at_most,
    cpu_devices,
    in_turns,
    median_of,
    timer,
)
from benchmarks.peers.driver import Member
from benchmarks.peers.gradients import calls_for, count_and_bytes

JOBS = "200x256,40x16K,40x64K,40x128K,20x256K,20x1M,1x1K,1x1M,1x16M,1x64M"
PEERS = {"tf": "gradients_tf", "torch": "gradients_torch"}
CLAIMS = {"200x256": at_most(0.5), "40x16K": at_most(0.65), "40x64K": at_most(0.8)}
"""Packing pays for small arrays, the more the smaller they are."""

NO_LOSS = at_most(1.1)
"""The others lose no more than any step of `strategy.run` does."""

RATE = 0.1
WHOLE, CUT = PartitionSpec(), PartitionSpec("replica")

Arrays = list[Any]


def ours(strategy: rx.Strategy, given: Arrays) -> Callable[[], Any]:
    with strategy.scope():
        weights = [rx.Variable(np.zeros(len(g) // strategy.num_replicas_in_sync, np.float32)) for g in given]

    def step(targets: Arrays) -> None:
        gradients = [weight.value - target for weight, target in zip(weights, targets, strict=True)]
        reduced = rx.get_replica_context().all_reduce("sum", gradients)
        for weight, gradient in zip(weights, reduced, strict=True):
            weight.assign_sub(RATE * gradient)

    args = ([rx.PerReplica(target, "rows") for target in given],)

    def one() -> Any:
        strategy.run(step, args)
        return [weight._array for weight in weights]

    return one


def by_hand(strategy: rx.Strategy, given: Arrays, reduce: Callable[[Arrays], Arrays]) -> Callable[[], Any]:
    mesh = strategy.placement.mesh

    def body(weights: Arrays, targets: Arrays) -> Arrays:
        gradients = [weight - target for weight, target in zip(weights, targets, strict=True)]
        return [weight - RATE * gradient for weight, gradient in zip(weights, reduce(gradients), strict=True)]

    fn = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=(WHOLE, CUT), out_specs=WHOLE, check_vma=False), donate_argnums=0
    )
    zeros = [np.zeros(len(g) // strategy.num_replicas_in_sync, np.float32) for g in given]
    weights = jax.device_put(zeros, NamedSharding(mesh, WHOLE))

    def one() -> Any:
        nonlocal weights
        weights = fn(weights, given)
        return weights

    return one


def psum(arrays: Arrays) -> Arrays:
    return jax.lax.psum(arrays, "replica")


def packed(arrays: Arrays) -> Arrays:
    whole = jax.lax.psum(jnp.concatenate(arrays), "replica")
    return jnp.split(whole, np.cumsum([array.size for array in arrays])[:-1])


def halves(arrays: Arrays) -> Arrays:
    scattered = [jax.lax.psum_scatter(array, "replica", tiled=True) for array in arrays]
    return [jax.lax.all_gather(mine, "replica", tiled=True) for mine in scattered]


def measure(job: str, devices: int, rounds: int, members: Sequence[Member] = ()) -> Times:
    count, size = count_and_bytes(job)
    strategy = rx.MirroredStrategy(jax.devices()[:devices])
    rows = np.ones(devices * max(size // 4, devices), np.float32)
    given = [jax.device_put(rows, strategy.placement.split) for _ in range(count)]
    ways = {"replicax": ours(strategy, given)}
    ways |= {reduce.__name__: by_hand(strategy, given, reduce) for reduce in (psum, packed, halves)}
    timers = {name: timer(way, calls_for(job)) for name, way in ways.items()}
    return in_turns(timers | {member.peer: member.seconds for member in members}, rounds)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--devices", default="2,4")
    parser.add_argument("--jobs", default=JOBS, help="count x bytes, as 200x256,1x16M")
    parser.add_argument("--peers", default="", help="tf, torch or both: with two devices")
    parser.add_argument("--python", default=str(BENCH_PYTHON), help="where TensorFlow and torch live")
    parser.add_argument("--untuned", action="store_true", help="leave the allocator alone")
    asked = parser.parse_args(argv)
    devices = list(map(int, asked.devices.split(",")))
    if asked.untuned:
        os.environ |= {"REPLICAX_HOST_TUNING": "0", "NPROC": str(2 * max(devices))}
    cpu_devices(max(devices))
    peers = [PEERS[name] for name in asked.peers.split(",") if name]
    report = Report(
        f"A step that sums gradients over the replicas and updates weights: ms, {asked.rounds} rounds"
        + (", allocator untuned" if asked.untuned else ""),
        "gradients", "devices", "replicax", "lax.psum", "one pack", "halves", *asked.peers.split(",") if peers else (),
        "replicax / one pack", ratio="replicax / lax.psum",
    )  # fmt: skip
    for job in asked.jobs.split(","):
        for number in devices:
            members = [Member(peer, job, asked.python) for peer in peers if number == 2]
            try:
                times = measure(job, number, asked.rounds, members)
            finally:
                for member in members:
                    member.close()
            report.add(
                job, str(number), *(median_of(times[name], "ms") if name in times else "" for name in _columns(peers)),
                str(Ratio.between(times["replicax"], times["packed"])),
                ratio=Ratio.between(times["replicax"], times["psum"]), claim=CLAIMS.get(job, NO_LOSS),
            )  # fmt: skip
    report.show()


def _columns(peers: Sequence[str]) -> list[str]:
    return ["replicax", "psum", "packed", "halves", *peers]


if __name__ == "__main__":
    main()
