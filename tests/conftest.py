"""What machine do the tests run on? Eight CPU devices, with the thread pool that their collectives need."""

import os

os.environ.setdefault("NPROC", "16")
os.environ.setdefault("REPLICAX_HOST_TUNING", "0")

import jax

jax.config.update("jax_num_cpu_devices", 8)
