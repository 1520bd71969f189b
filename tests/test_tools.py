"""What do JAX's own tools see of a step? Its name, its lines, and programs that the next process finds ready."""

import gzip
import io
import json
import pdb

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from tests.fresh import python


def per_replica(strategy, *values):
    return strategy.experimental_distribute_values_from_function(lambda c: values[c.replica_id_in_sync_group])


def logarithm_of_the_weights(x):
    return jnp.log(x).sum()  # HERE


@pytest.mark.parametrize("options", [None, rx.RunOptions(eager=True)], ids=["compiled", "eager"])
def test_a_nan_is_traced_to_the_users_line(options):
    strategy = rx.MirroredStrategy(jax.devices()[:2])
    x = per_replica(strategy, jnp.ones(3), -jnp.ones(3))
    line = logarithm_of_the_weights.__code__.co_firstlineno + 1

    with jax.debug_nans(True), pytest.raises(FloatingPointError) as raised:
        strategy.run(logarithm_of_the_weights, (x,), options=options)

    assert f"{__file__}:{line}" in str(raised.value)


def test_a_step_prints_once_per_replica(capfd):
    strategy = rx.MirroredStrategy(jax.devices()[:2])

    strategy.run(lambda x: jax.debug.print("sees {}", x), (per_replica(strategy, 1.0, 2.0),))
    jax.effects_barrier()

    assert sorted(capfd.readouterr().out.split("\n")) == ["", "sees 1.0", "sees 2.0"]


@pytest.mark.parametrize("options", [None, rx.RunOptions(eager=True)], ids=["compiled", "eager"])
def test_a_profile_shows_each_run_by_the_name_of_its_step(tmp_path, options):
    strategy = rx.MirroredStrategy(jax.devices()[:2])

    def train_step(x):
        return rx.get_replica_context().all_reduce("mean", x)

    x = per_replica(strategy, jnp.ones(3), jnp.ones(3))
    strategy.run(train_step, (x,), options=options)
    with jax.profiler.trace(tmp_path):
        for _ in range(3):
            strategy.run(train_step, (x,), options=options)

    (trace,) = tmp_path.glob("**/*.trace.json.gz")
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    runs = [event for event in events if event.get("name") in ("PjitFunction(train_step)", "train_step")]
    assert len(runs) >= 3


def test_a_lowered_step_tells_its_text_and_its_cost():
    strategy = rx.MirroredStrategy(jax.devices()[:2])
    with strategy.scope():
        w = rx.Variable(jnp.ones((8, 8)))

    def matrix_step(x):
        w.assign(rx.get_replica_context().all_reduce("mean", x @ w.value))

    lowered = strategy.lower(matrix_step, (per_replica(strategy, jnp.ones((8, 8)), jnp.ones((8, 8))),))

    assert "module @jit_matrix_step" in lowered.as_text()
    assert "all_reduce" in lowered.as_text()
    assert lowered.cost_analysis()["flops"] >= 2 * 8**3
    np.testing.assert_array_equal(w.numpy(), np.ones((8, 8)))


TRAINING = """
import jax, jax.numpy as jnp, optax, replicax as rx
counts = {"cache_hits": 0, "cache_misses": 0}
def count(event, **_):
    counts[event.rsplit("/", 1)[-1]] = counts.get(event.rsplit("/", 1)[-1], 0) + 1
jax.monitoring.register_event_listener(count)
strategy = rx.MirroredStrategy(jax.devices())
with strategy.scope():
    w = rx.Variable(jnp.ones(4), name="w")
optimizer = rx.Optimizer(optax.adam(0.1), gradients="mean")
def step(x):
    loss, gradients = rx.value_and_grad(lambda: ((w.value * x) ** 2).mean(), [w])()
    optimizer.apply_gradients(zip(gradients, [w]))
    return loss
x = strategy.experimental_distribute_values_from_function(lambda c: jnp.arange(4.0) + c.replica_id_in_sync_group)
for _ in range(2):
    loss = strategy.reduce("mean", strategy.run(step, (x,)))
print(float(loss), counts["cache_hits"], counts["cache_misses"])
"""


def test_a_second_process_compiles_nothing(tmp_path):
    settings = {
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
    }

    first = python(TRAINING, **settings).split()
    second = python(TRAINING, **settings).split()

    assert first[0] == second[0]
    assert int(first[2]) > 0
    assert (int(second[1]) > 0, int(second[2])) == (True, 0)


def test_a_step_that_is_compiled_again_and_again_for_new_shapes_is_told_so():
    strategy = rx.OneDeviceStrategy(jax.devices()[0])

    def growing_step(x):
        return x * 2

    with pytest.warns(UserWarning, match=r"(?s)`growing_step` has been compiled for 8 kinds.*float32\[8\]") as told:
        for rows in range(1, 10):
            strategy.run(growing_step, (jnp.ones(rows),))

    assert [warning.filename for warning in told] == [__file__]


def test_a_step_that_is_made_anew_around_a_changing_value_is_told_so():
    strategy = rx.OneDeviceStrategy(jax.devices()[0])

    with pytest.warns(UserWarning, match=f"(?s){__file__}.*was made anew and compiled 8 times") as told:
        for rate in range(9):
            strategy.run(lambda x, rate=rate: x * rate, (jnp.ones(2),))

    assert len(told) == 1


def test_a_debugger_stops_in_a_step_that_runs_line_by_line():
    strategy = rx.MirroredStrategy(jax.devices()[:2], eager=True)
    said = io.StringIO()
    debugger = pdb.Pdb(stdin=io.StringIO("p float(x) + 41\ncontinue\n"), stdout=said, nosigint=True, readrc=False)

    def step(x):
        context = rx.get_replica_context()
        if context.replica_id_in_sync_group == 0:
            debugger.set_trace()
        return context.all_reduce("sum", x)

    assert float(strategy.run(step, (per_replica(strategy, 1.0, 2.0),))) == 3.0
    assert "42.0" in said.getvalue()
