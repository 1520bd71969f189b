"""Is training with replicax as fast as by hand, and as with what people use instead?

Each peer trains the same workload from the same weights on the same batches, in a process of its own, set up as its users
set it up; all must come to the same loss. Rounds are interleaved: in each, every peer runs some steps while the others
stand idle. The ratio is the peer's time over ours: above 1, ours is faster. `benchmarks/peers/work.py` says what a to e are.

    python -m benchmarks.against_peers [--workloads a,b,c,d,e] [--peers raw_jax,pmap,keras_dp] [--rounds 9]
    python -m benchmarks.against_tf                      # and `against_torch_ddp`: after `make bench-env`
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence

from benchmarks._measure import BENCH_PYTHON, Claim, Ratio, Report, at_least, in_turns, median_of
from benchmarks.peers.driver import Member

ELSEWHERE = ("tf_mirrored", "torch_ddp")
"""Peers that live in the benchmark environment."""

CLAIMS: dict[tuple[str, str], Claim] = {
    ("a", "raw_jax"): at_least(1),
    ("b", "raw_jax"): at_least(round(1 / 1.05, 3)),
    ("c", "raw_jax"): at_least(1.5),
    ("d", "raw_jax"): at_least(1.8),
    ("e", "raw_jax"): at_least(1.05),
    ("a", "tf_mirrored"): at_least(2),
    **{(workload, "tf_mirrored"): at_least(1) for workload in "bc"},
    **{(workload, peer): at_least(1) for workload in "cde" for peer in ("pmap", "keras_dp")},
}
"""By workload and peer. Where there is none, it depends on the machine, or XLA's convolutions and copies decide."""

SAME_LOSS = 1e-4
"""After twenty steps, as a part of the loss."""


def compare(report: Report, workload: str, peers: Sequence[str], rounds: int, python: str) -> None:
    """One workload: every peer's time per step, interleaved."""
    with contextlib.ExitStack() as stack:
        members = [Member(p, workload, python if p in ELSEWHERE else sys.executable) for p in ["ours", *peers]]
        for member in members:
            stack.callback(member.close)
        losses = {member.peer: member.ask("losses")["last"] for member in members}
        times = in_turns({member.peer: member.seconds for member in members}, rounds, warm_up=1)
    for peer, seconds in times.items():
        difference = abs(losses[peer] - losses["ours"]) / abs(losses["ours"])
        if difference > SAME_LOSS:
            raise SystemExit(f"{peer} trains something else: its loss is {losses[peer]}, ours {losses['ours']}")
        of_one = Ratio.of([s * 1e3 for s in seconds])
        report.add(
            f"{workload}  {peer}", median_of(seconds, "ms"), f"{(of_one.high - of_one.low) / of_one.value:.0%}",
            f"{losses[peer]:.5f}", ratio="" if peer == "ours" else Ratio.between(seconds, times["ours"]),
            claim=CLAIMS.get((workload, peer)),
        )  # fmt: skip


def main(argv: Sequence[str] | None = None, peers: str = "raw_jax,pmap,keras_dp") -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", default="a,b,c,d,e")
    parser.add_argument("--peers", default=peers)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--python", default=str(BENCH_PYTHON), help="where TensorFlow and torch live")
    asked = parser.parse_args(argv)
    report = Report(
        f"Training on two replicas, {asked.rounds} rounds", "workload and peer", "ms per step", "spread",
        "loss after 20 steps", ratio="peer / replicax",
    )  # fmt: skip
    for workload in asked.workloads.split(","):
        compare(report, workload, [p for p in asked.peers.split(",") if p], asked.rounds, asked.python)
    report.show()


if __name__ == "__main__":
    main()
