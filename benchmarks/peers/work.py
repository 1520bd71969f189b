"""What is trained? Five workloads: initial weights, batches and hyper-parameters, in NumPy only.

a  MLP 8-8-2, batch 16                  dispatch decides
b  MLP 784-512-512-10, batch 256        between dispatch and arithmetic
c  MLP 1024-2048-2048-10, batch 256     large weights: reductions and updates
d  CNN 28x28, 3x3x32, 3x3x64, batch 128 convolutions
e  transformer, d 256, 4 layers, length 128, batch 16, Adam
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

REPLICAS = 2
MOMENTUM = 0.9
B1, B2, EPS = 0.9, 0.999, 1e-5


@dataclasses.dataclass(frozen=True)
class Workload:
    kind: str
    batch: int
    steps: int
    """Timed steps per round."""
    sizes: tuple[int, ...] = ()
    optimizer: str = "sgd"
    rate: float = 0.01


WORK = {
    "a": Workload("mlp", 16, 500, (8, 8, 2)),
    "b": Workload("mlp", 256, 40, (784, 512, 512, 10)),
    "c": Workload("mlp", 256, 8, (1024, 2048, 2048, 10)),
    "d": Workload("cnn", 128, 5),
    "e": Workload("lm", 16, 3, optimizer="adam", rate=1e-3),
}
WIDTH, LAYERS, HEADS, LENGTH, VOCABULARY = 256, 4, 4, 128, 1024


def params(name: str) -> dict[str, np.ndarray]:
    """Initial weights by name, in layer order."""
    work, rng = WORK[name], np.random.default_rng(0)

    def normal(*shape: int, scale: float) -> np.ndarray:
        return (rng.standard_normal(shape) * scale).astype(np.float32)

    def zeros(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.float32)

    p: dict[str, np.ndarray] = {}
    if work.kind == "mlp":
        for i, (a, b) in enumerate(zip(work.sizes[:-1], work.sizes[1:], strict=True)):
            p[f"w{i}"], p[f"b{i}"] = normal(a, b, scale=(2 / a) ** 0.5), zeros(b)
    elif work.kind == "cnn":
        p["k0"], p["kb0"] = normal(3, 3, 1, 32, scale=(2 / 9) ** 0.5), zeros(32)
        p["k1"], p["kb1"] = normal(3, 3, 32, 64, scale=(2 / 288) ** 0.5), zeros(64)
        p["w0"], p["b0"] = normal(12 * 12 * 64, 128, scale=(2 / 9216) ** 0.5), zeros(128)
        p["w1"], p["b1"] = normal(128, 10, scale=(2 / 128) ** 0.5), zeros(10)
    else:
        d = WIDTH
        p["emb"], p["pos"] = normal(VOCABULARY, d, scale=0.02), normal(LENGTH, d, scale=0.02)
        for i in range(LAYERS):
            p[f"g1_{i}"], p[f"c1_{i}"] = np.ones(d, np.float32), zeros(d)
            p[f"qkv_{i}"], p[f"qkvb_{i}"] = normal(d, 3 * d, scale=0.02), zeros(3 * d)
            p[f"o_{i}"], p[f"ob_{i}"] = normal(d, d, scale=0.02), zeros(d)
            p[f"g2_{i}"], p[f"c2_{i}"] = np.ones(d, np.float32), zeros(d)
            p[f"u_{i}"], p[f"ub_{i}"] = normal(d, 4 * d, scale=0.02), zeros(4 * d)
            p[f"v_{i}"], p[f"vb_{i}"] = normal(4 * d, d, scale=0.02), zeros(d)
        p["gf"], p["cf"], p["head"] = np.ones(d, np.float32), zeros(d), normal(d, VOCABULARY, scale=0.02)
    return p


def batches(name: str, count: int = 4) -> list[tuple[np.ndarray, np.ndarray]]:
    """Global batches, cycled."""
    work, rng, made = WORK[name], np.random.default_rng(1), []
    for _ in range(count):
        if work.kind == "lm":
            tokens = rng.integers(0, VOCABULARY, (work.batch, LENGTH + 1)).astype(np.int32)
            made.append((np.ascontiguousarray(tokens[:, :-1]), np.ascontiguousarray(tokens[:, 1:])))
            continue
        shape: Any = (work.batch, work.sizes[0]) if work.kind == "mlp" else (work.batch, 28, 28, 1)
        classes = work.sizes[-1] if work.kind == "mlp" else 10
        x = rng.standard_normal(shape).astype(np.float32)
        made.append((x, rng.integers(0, classes, work.batch).astype(np.int32)))
    return made
