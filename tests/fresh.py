"""How does a test try something in a process of its own?

What happens at import, or before JAX's backend starts, can be tried once per process and not at all in the one that
runs the tests. `python` starts a new interpreter with a clean environment and a deadline.
"""

import os
import subprocess
import sys
import textwrap

# What would decide the outcome of a test about set-up if it leaked in from whoever runs the tests.
SETTINGS = ("NPROC", "PJRT_NPROC", "REPLICAX_NPROC", "REPLICAX_HOST_TUNING", "JAX_NUM_CPU_DEVICES", "XLA_FLAGS")


def python(program: str, *, deadline: float = 120, **settings: str) -> str:
    """Runs `program` with `settings` in its environment; returns what it printed, or fails with all it said."""
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS} | settings
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=deadline,
    )
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout.strip()
