"""Do the examples run, small, as a reader would run them?"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
SMALL = {
    "digits": ["--devices", "2", "--epochs", "4"],
    "batchnorm": ["--devices", "2", "--steps", "21"],
    "language_model": ["--devices", "2", "--steps", "51", "--width", "32"],
    "custom_loop": ["--devices", "2", "--epochs", "2", "--directory", "checkpoints"],
    "equinox": ["--devices", "2", "--steps", "41"],
    "keras_fit": ["--devices", "2", "--epochs", "3"],
}
LEARNT = {
    "digits": r"test accuracy (8|9)\d",
    "batchnorm": r"test accuracy [5-9]\d",
    "language_model": r"last loss [12]\.",
    "custom_loop": r"epoch 2 .* test accuracy [7-9]\d",
    "equinox": r"test accuracy [7-9]\d",
    "keras_fit": r"test accuracy [6-9]\d",
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", SMALL)
def test_it_runs_and_learns(name, tmp_path):
    program = [sys.executable, str(EXAMPLES / name / "with_replicax.py"), *SMALL[name]]

    done = subprocess.run(program, capture_output=True, text=True, timeout=220, cwd=tmp_path)

    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(LEARNT[name], done.stdout), done.stdout


def test_each_folder_is_run():
    assert {path.parent.name for path in EXAMPLES.glob("*/with_replicax.py")} == set(SMALL)


@pytest.mark.parametrize("twin", sorted(EXAMPLES.glob("*/with_tf.py")), ids=lambda path: path.parent.name)
def test_a_twin_is_valid_python(twin):
    compile(twin.read_text(), str(twin), "exec")
