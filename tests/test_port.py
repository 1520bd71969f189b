"""The porting pages: the right-hand side of each diff runs and gives what it should, the left-hand side is Python."""

import re
from pathlib import Path

import jax
import keras
import numpy as np
import pytest

PAGES = Path(__file__).parents[1] / "docs" / "port"

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras with NumPy 2


def diffs():
    """Each diff by its page and the heading that it stands under."""
    found = {}
    for page in sorted(PAGES.glob("*.md")):
        heading = ""
        for title, block in re.findall(
            r"^## ([^\n]*)$|^```diff\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL
        ):
            heading = title or heading
            if block:
                assert (page.stem, heading) not in found, "one diff under a heading"
                found[page.stem, heading] = block
    return found


def side(diff, mark):
    """The program on one side."""
    lines = [line for line in diff.splitlines() if not line or line[0] in (" ", mark)]
    return "\n".join(line[1:] for line in lines)


def towers(ran):
    np.testing.assert_allclose(ran["w"].numpy(), 3.0, atol=0.01)


def a_loop_of_2018(ran):
    np.testing.assert_allclose(ran["w"].numpy().ravel(), [1, 2, 3], atol=0.05)
    assert int(ran["global_step"]) == 30, "60 batches of 20 rows, two in each step"


def one_place_in_2018(ran):
    assert ran["counts"].numpy().tolist() == [12.0, 21.0]
    assert ran["distribution"].parameter_devices == [jax.devices()[0]]


def replicas_that_meet(ran):
    assert ran["moving"].numpy().tolist() == [3.625, 3.875]
    assert ran["total"] == 1.0


def keras_of_2018(ran):
    losses = ran["history"].history["loss"]
    assert losses[2] < losses[0]
    assert ran["model"].layers[0].kernel.value.devices() == set(ran["distribution"].worker_devices)


def tpus_of_2018(ran):
    np.testing.assert_allclose(ran["w"].numpy(), 3 * (1 - 0.6**5), rtol=1e-5)
    np.testing.assert_allclose(ran["context"].last_step_outputs["loss"], 9 * 0.6**8, rtol=1e-5)


def keras_fit(ran):
    assert ran["accuracy"] > 0.8


def a_loop(ran):
    assert float(ran["loss"]) < 0.7
    assert ran["seen"].numpy() == 1500, "each row once in each of three epochs"


def central_storage(ran):
    assert float(ran["losses"]) == 80.0
    np.testing.assert_allclose(ran["table"].numpy()[9:11, 0], [0.8, 1.0], rtol=1e-6)
    assert ran["table"].devices == (jax.devices()[0],)


def plain_jax(ran):
    assert float(ran["loss"]) < 0.6
    assert isinstance(ran["w"], jax.Array), "equal on all replicas, which was proven"


def tpus(ran):
    assert ran["total"].numpy() == 640.0


DIFFS = diffs()
CHECKS = {
    ("jax", "The loop"): plain_jax,
    ("towers", "Towers"): towers,
    ("towers", "Keras"): keras_of_2018,
    ("towers", "A loop of one's own"): a_loop_of_2018,
    ("towers", "Variables in one place"): one_place_in_2018,
    ("towers", "TPUs"): tpus_of_2018,
    ("replicas", "Keras fit"): keras_fit,
    ("replicas", "A loop of one's own"): a_loop,
    ("replicas", "Replicas that meet"): replicas_that_meet,
    ("replicas", "Central storage"): central_storage,
    ("replicas", "TPUs"): tpus,
}


def test_every_diff_is_checked():
    assert DIFFS.keys() == CHECKS.keys()


@pytest.mark.parametrize("where", DIFFS, ids="-".join)
def test_the_right_hand_side_runs(where):
    program: dict[str, object] = {"__name__": "__main__"}
    keras.utils.set_random_seed(0)  # the programs leave the weights that Keras begins with to chance

    exec(compile(side(DIFFS[where], "+"), f"docs/port/{where[0]}.md: {where[1]}", "exec"), program)

    CHECKS[where](program)


@pytest.mark.parametrize("where", DIFFS, ids="-".join)
def test_the_left_hand_side_is_a_program_without_replicax(where):
    old = side(DIFFS[where], "-")

    compile(old, where[1], "exec")
    assert ("jax.pmap" if where[0] == "jax" else "import tensorflow as tf") in old and "rx." not in old


@pytest.mark.parametrize(
    ("mark", "program"), [("-", "import a\n\nf(a)\nboth()"), ("+", "import b\n\nboth()")], ids=["left", "right"]
)
def test_a_diff_has_two_sides(mark, program):
    assert side("-import a\n+import b\n\n-f(a)\n both()\n", mark) == program
