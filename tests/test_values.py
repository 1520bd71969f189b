"""How does one name hold N values? What a `PerReplica` says when it is taken for one array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx

VALUE = rx.PerReplica((1.0, 2.0))

USES = {
    "x + 1": lambda x: x + 1,
    "1 - x": lambda x: 1 - x,
    "array * x": lambda x: jnp.ones(3) * x,
    "numpy * x": lambda x: np.ones(3) * x,
    "-x": lambda x: -x,
    "x < 1": lambda x: x < 1,
    "x[0]": lambda x: x[0],
    "for ... in x": list,
    "if x": bool,
    "float(x)": float,
    "f'{x:.2f}'": lambda x: f"{x:.2f}",
    "np.asarray(x)": np.asarray,
    "jnp.asarray(x)": jnp.asarray,
    "jnp.sum(x)": jnp.sum,
    "jax.jit(f)(x), x.dtype": lambda x: jax.jit(lambda y: y + 1)(x),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_a_value_per_replica_is_no_number_and_says_what_to_write(use):
    with pytest.raises(rx.LocalityError, match="using a PerReplica object while not inside") as refused:
        use(VALUE)

    assert isinstance(refused.value, TypeError)
    assert 'strategy.reduce("mean", value)' in str(refused.value)


def test_an_attribute_of_arrays_is_not_there_and_says_whose_is():
    with pytest.raises(AttributeError, match=r"value.values\[0\].shape"):
        _ = VALUE.shape
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = VALUE.nonsense
    assert not hasattr(VALUE, "dtype")


def test_printing_formats_without_a_specification():
    assert f"{VALUE}" == repr(VALUE) == "PerReplica:{\n  0: 1.0,\n  1: 2.0\n}"
