"""torch's DistributedDataParallel: two processes, gloo, one thread each. This process is rank 0 and starts rank 1."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from benchmarks.peers.work import (
    B1,
    B2,
    EPS,
    HEADS,
    LAYERS,
    LENGTH,
    MOMENTUM,
    REPLICAS,
    WIDTH,
    WORK,
    batches,
    params,
)  # fmt: skip

GO, STOP = 1, 0


class _Net(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.kind = WORK[name].kind
        p = {key: torch.from_numpy(value.copy()) for key, value in params(name).items()}
        if self.kind == "cnn":  # torch lays convolutions out as OIHW, and flattens channels first
            p["k0"], p["k1"] = (p[key].permute(3, 2, 0, 1).contiguous() for key in ("k0", "k1"))
            p["w0"] = p["w0"].reshape(12, 12, 64, 128).permute(2, 0, 1, 3).reshape(9216, 128)
        for key, value in p.items():
            if value.ndim == 2 and key not in ("emb", "pos"):
                p[key] = value.t().contiguous()
        self.p = nn.ParameterDict({key: nn.Parameter(value) for key, value in p.items()})

    def forward(self, x: Any) -> Any:
        p = self.p
        if self.kind == "mlp":
            layers = len(p) // 2
            for i in range(layers):
                x = F.linear(x, p[f"w{i}"], p[f"b{i}"])
                x = F.relu(x) if i < layers - 1 else x
            return x
        if self.kind == "cnn":
            x = F.relu(F.conv2d(x, p["k0"], p["kb0"]))
            x = F.max_pool2d(F.relu(F.conv2d(x, p["k1"], p["kb1"])), 2)
            return F.linear(F.relu(F.linear(x.flatten(1), p["w0"], p["b0"])), p["w1"], p["b1"])
        rows = x.shape[0]
        h = F.embedding(x, p["emb"]) + p["pos"]
        for i in range(LAYERS):
            n = F.linear(F.layer_norm(h, (WIDTH,), p[f"g1_{i}"], p[f"c1_{i}"]), p[f"qkv_{i}"], p[f"qkvb_{i}"])
            q, k, v = n.view(rows, LENGTH, 3 * HEADS, WIDTH // HEADS).transpose(1, 2).chunk(3, 1)
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            h = h + F.linear(a.transpose(1, 2).reshape(rows, LENGTH, WIDTH), p[f"o_{i}"], p[f"ob_{i}"])
            n = F.linear(F.layer_norm(h, (WIDTH,), p[f"g2_{i}"], p[f"c2_{i}"]), p[f"u_{i}"], p[f"ub_{i}"])
            h = h + F.linear(F.gelu(n, approximate="tanh"), p[f"v_{i}"], p[f"vb_{i}"])
        return F.linear(F.layer_norm(h, (WIDTH,), p["gf"], p["cf"]), p["head"])


def _rank(name: str, rank: int, port: int) -> Callable[[int], Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=REPLICAS)
    work = WORK[name]
    net = nn.parallel.DistributedDataParallel(_Net(name), gradient_as_bucket_view=True)
    opt = (
        torch.optim.SGD(net.parameters(), work.rate, momentum=MOMENTUM)
        if work.optimizer == "sgd"
        else torch.optim.Adam(net.parameters(), work.rate, betas=(B1, B2), eps=EPS)
    )
    share = work.batch // REPLICAS

    def prepared(x: Any, y: Any) -> Any:
        x, y = (torch.from_numpy(a[rank * share : (rank + 1) * share]) for a in (x, y))
        x = x.permute(0, 3, 1, 2) if work.kind == "cnn" else x.long() if work.kind == "lm" else x
        return x, y.long()

    data = [prepared(*batch) for batch in batches(name)]
    taken = 0

    def one(i: int) -> Any:
        nonlocal taken
        x, y = data[i % len(data)]
        opt.zero_grad(set_to_none=True)
        loss = F.cross_entropy(net(x).flatten(0, -2), y.flatten())
        loss.backward()
        if work.optimizer == "adam":  # the other peers add epsilon before the bias is corrected: the same, torch's way
            taken += 1
            opt.param_groups[0]["eps"] = EPS / (1 - B2**taken) ** 0.5
        opt.step()
        return loss.detach()

    return one


def prepare(name: str) -> tuple[Callable[[int], Any], Callable[[Any], float]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    other = [sys.executable, "-m", "benchmarks.peers.torch_ddp", name, str(port)]
    subprocess.Popen(other, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdin=subprocess.PIPE)
    one = _rank(name, 0, port)

    def step(i: int) -> Any:
        dist.broadcast(torch.tensor([GO, i]), 0)  # tells the other rank to take the same step
        return one(i)

    def read(loss: Any) -> float:
        total = loss.clone()
        dist.broadcast(torch.tensor([2, 0]), 0)
        dist.all_reduce(total)
        return float(total) / REPLICAS

    return step, read


def _follow(name: str, port: int) -> None:
    """Rank 1: does what rank 0 says, until rank 0 is gone."""
    one, loss = _rank(name, 1, port), torch.zeros(())
    while True:
        order = torch.zeros(2, dtype=torch.int64)
        try:
            dist.broadcast(order, 0)
        except RuntimeError:
            return
        if order[0] == GO:
            loss = one(int(order[1]))
        else:
            dist.all_reduce(loss.clone())


if __name__ == "__main__":
    _follow(sys.argv[1], int(sys.argv[2]))
