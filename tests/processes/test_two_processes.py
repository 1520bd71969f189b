"""Nothing assumes one process: the same model over two real processes, joined by gloo, equals one device."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

MEMBER = Path(__file__).with_name("member.py")
pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


def run_job(processes: int, devices: int, deadline: float = 120.0) -> list[dict]:
    """Runs `member.py` in so many processes; all end together or the survivors are killed at the deadline."""
    with socket.socket() as reserved:  # bound, not listening: nobody else gets this port meanwhile
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        reserved.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{reserved.getsockname()[1]}"
        environment = os.environ | {"NPROC": "8", "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}
        members = [
            subprocess.Popen(
                [sys.executable, str(MEMBER), address, str(processes), str(i), str(devices)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
            )
            for i in range(processes)
        ]  # fmt: skip
        try:
            outputs = [member.communicate(timeout=deadline) for member in members]
        finally:
            for member in members:
                if member.poll() is None:
                    member.kill()
    for member, (_, errors) in zip(members, outputs, strict=True):
        assert member.returncode == 0, errors[-3000:]
    return [json.loads(out.strip().splitlines()[-1]) for out, _ in outputs]


def one_device() -> tuple[list[float], np.ndarray]:
    """The same training by hand, in plain JAX and Optax, with the whole batch."""
    params = [
        jnp.linspace(-1, 1, 12, dtype=jnp.float32).reshape(4, 3),
        jnp.linspace(-1, 1, 3, dtype=jnp.float32).reshape(3, 1),
    ]
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    y = x.sum(1, keepdims=True)
    optimizer = optax.sgd(0.1, momentum=0.9)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state):
        def loss(params):
            return ((jnp.tanh(x @ params[0]) @ params[1] - y) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state)
        return value, optax.apply_updates(params, updates), state

    losses = []
    for _ in range(5):
        value, params, state = step(params, state)
        losses.append(float(value))
    return losses, np.asarray(params[0])


@pytest.mark.parametrize(("processes", "devices"), [(2, 1), (2, 2)], ids=["one-device-each", "two-devices-each"])
def test_training_over_processes_equals_one_device(processes, devices):
    losses, w = one_device()

    results = run_job(processes, devices)

    for result in results:
        assert result["replicas"] == processes * devices
        assert result["local"] == devices
        np.testing.assert_allclose(result["losses"], np.stack([losses, losses], 1), rtol=1e-5)
        np.testing.assert_allclose(result["w"], w, rtol=0, atol=1e-5)
        assert result["seen"] == 40.0
