"""How did a process join a cluster in 2018? `run_standard_tensorflow_server`."""

from __future__ import annotations

from typing import Any

from replicax.cluster import Server, serve_from_tf_config


def run_standard_tensorflow_server(session_config: Any = None) -> Server:
    """Starts the server of the task that ``TF_CONFIG`` says this process is, and returns it.

    Raises:
      ClusterError: ``TF_CONFIG`` does not say it, or nobody in the cluster trains.
      NotAvailableError: Otherwise; see `rx.cluster.Server`.
    """
    return serve_from_tf_config(session_config)
