"""How does `TF_CONFIG` say it? One JSON object in an environment variable, the way tf.distribute jobs are started."""

from __future__ import annotations

import json
import os
from typing import Any

from replicax._errors import ClusterError, message
from replicax.cluster._resolvers.base import ClusterResolver, Found, alone, task_url
from replicax.cluster._spec import ClusterSpec

_VARIABLE = "TF_CONFIG"
_EXAMPLE = """TF_CONFIG='{"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}'"""


class TFConfigClusterResolver(ClusterResolver):
    """The cluster that the environment variable ``TF_CONFIG`` describes.

    Launchers that were written for tf.distribute set it; nothing needs to change there. The variable is read again on
    every question. Each thing you pass or set here beats what it says.

    Args:
      task_type: The job this process belongs to, instead of ``task.type``.
      task_id: The number of its task, instead of ``task.index``.
      rpc_layer: The protocol before addresses, instead of ``rpc_layer``.
      environment: A label, instead of ``environment``.

    Example:
      >>> import os
      >>> from replicax.cluster import TFConfigClusterResolver
      >>> os.environ["TF_CONFIG"] = '''{"cluster": {"worker": ["a:2222", "b:2222"]},
      ...                               "task": {"type": "worker", "index": 1}}'''
      >>> resolver = TFConfigClusterResolver()
      >>> resolver.task_id, resolver.master()
      (1, 'b:2222')
      >>> TFConfigClusterResolver(task_id=0).master()
      'a:2222'
      >>> del os.environ["TF_CONFIG"]
    """

    def cluster_spec(self) -> ClusterSpec:
        return read_cluster(read_tf_config())

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of the given task; else ``session_master``, if the variable names one; else this task's own.

        A process that is alone has nobody to reach: the answer is "".
        """
        session_master = read_tf_config().get("session_master")
        if session_master is not None and task_type is None and task_id is None:
            return session_master
        if alone(self.cluster_spec()):
            return ""
        address = task_url(self, task_type, task_id, rpc_layer)
        if not address:
            raise _unreadable("it names several tasks and does not say which of them this process is")
        return address

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """How many devices other than CPUs a task has, this process's own unless said otherwise."""
        task_type = self.task_type if task_type is None else task_type
        task_id = self.task_id if task_id is None else task_id
        return super().num_accelerators(task_type, task_id, config_proto)

    def _found(self) -> Found:
        config = read_tf_config()
        task = _object(config, "task")
        task_type, task_id = task.get("type"), task.get("index")
        return Found(
            task_type=None if task_type is None else str(task_type),
            task_id=None if task_id is None else _number(task_id, "task.index"),
            rpc_layer=config.get("rpc_layer"),
            environment=config.get("environment"),
        )


def read_tf_config() -> dict[str, Any]:
    """The JSON object in ``TF_CONFIG``; empty if the variable is not set."""
    try:
        config = json.loads(os.environ.get(_VARIABLE, "{}"))
    except json.JSONDecodeError as error:
        raise _unreadable(f"{error.msg} at line {error.lineno}, column {error.colno}") from error
    if not isinstance(config, dict):
        raise _unreadable(f"it is a {type(config).__name__}, not an object")
    return config


def read_cluster(config: dict[str, Any]) -> ClusterSpec:
    """The cluster in a ``TF_CONFIG`` object; empty if there is none."""
    return ClusterSpec({job: _tasks(job, tasks) for job, tasks in _object(config, "cluster").items()})


def _tasks(job: str, tasks: Any) -> Any:
    # JSON has no integer keys: {"worker": {"3": "host:1"}} is how a job with holes in its numbering is written.
    if isinstance(tasks, dict):
        return {_number(index, f"cluster.{job}"): address for index, address in tasks.items()}
    return tasks


def _object(config: dict[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise _unreadable(f"{key!r} is a {type(value).__name__}, not an object")
    return value


def _number(value: Any, where: str) -> int:
    """Launchers write task numbers as 1 and as "1"."""
    try:
        return int(value)
    except (TypeError, ValueError):
        raise _unreadable(f"{value!r} in {where} is not a number") from None


def _unreadable(why: str) -> ClusterError:
    text = os.environ.get(_VARIABLE)
    return ClusterError(message(f"{_VARIABLE} cannot be used: {why}", [f"{_VARIABLE}={text}"], instead=[_EXAMPLE]))
