"""The rows that `input_keeps_up` and its peer in TensorFlow are fed with; in NumPy only."""

from __future__ import annotations

import numpy as np

SHAPES = {"mlp": (784,), "cnn": (28, 28, 1)}
EXAMPLES = 20_000


def examples(model: str) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(EXAMPLES, *SHAPES[model])).astype(np.float32)
    return x, random.integers(0, 10, size=EXAMPLES).astype(np.int32)
