"""What if one job is described in several places? `UnionResolver` joins them into one cluster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from replicax._errors import ClusterError, ClusterTypeError, TaskClashError, message
from replicax.cluster._resolvers.base import ClusterResolver, Found, said_first, task_url
from replicax.cluster._spec import ClusterSpec


class UnionResolver(ClusterResolver):
    """Several resolvers as one cluster.

    Use it when, say, workers come from one instance group and parameter servers from another. Jobs of the same name are
    joined: lists one after the other in the order of the arguments; as soon as one of them names its task numbers, all
    numbers are kept as they are. What is said about this process itself (its task, protocol and label) comes from the
    first resolver unless you say it here.

    Args:
      *resolvers: The resolvers to join, at least one.
      task_type: The job this process belongs to.
      task_id: The number of its task in the joined cluster.
      rpc_layer: The protocol before addresses.

    Raises:
      ClusterTypeError: If an argument is not a resolver.
      TaskClashError: From `cluster_spec()`, if two resolvers give one number to different tasks.

    Example:
      >>> from replicax.cluster import ClusterSpec, SimpleClusterResolver, UnionResolver
      >>> old = SimpleClusterResolver(ClusterSpec({"worker": ["a:1", "b:1"]}))
      >>> new = SimpleClusterResolver(ClusterSpec({"worker": ["c:1"], "ps": ["d:1"]}))
      >>> UnionResolver(old, new).cluster_spec()
      ClusterSpec({'ps': ['d:1'], 'worker': ['a:1', 'b:1', 'c:1']})
    """

    def __init__(
        self,
        *resolvers: ClusterResolver,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        **unknown: object,
    ) -> None:
        if unknown:
            raise _unknown_words(unknown)
        strangers: list[object] = [resolver for resolver in resolvers if not isinstance(resolver, ClusterResolver)]
        if strangers:
            raise _not_resolvers(strangers)
        if not resolvers:
            raise ClusterError(
                message(
                    "`UnionResolver()` needs at least one resolver",
                    instead=['UnionResolver(SimpleClusterResolver(ClusterSpec({"worker": ["10.0.0.1:2222"]})))'],
                )
            )
        super().__init__(task_type, task_id, rpc_layer)
        self._resolvers = resolvers

    def cluster_spec(self) -> ClusterSpec:
        return _join([resolver.cluster_spec() for resolver in self._resolvers])

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """The address of the task that was named, here or on this resolver; if none was, the first one's master."""
        if said_first(task_type, task_id, self._task_type, self._task_id) is None:
            return self._resolvers[0].master(rpc_layer=said_first(rpc_layer, self._rpc_layer))
        return task_url(self, task_type, task_id, rpc_layer)

    def num_accelerators(
        self, task_type: str | None = None, task_id: int | None = None, config_proto: object = None
    ) -> dict[str, int]:
        """What the first resolver counts."""
        return self._resolvers[0].num_accelerators(task_type, task_id, config_proto)

    def _found(self) -> Found:
        first = self._resolvers[0]
        return Found(first.task_type, first.task_id, first.rpc_layer, first.environment)


UnionClusterResolver = UnionResolver


def _join(clusters: list[ClusterSpec]) -> ClusterSpec:
    jobs = dict.fromkeys(job for cluster in clusters for job in cluster.jobs)
    described = [cluster.as_dict() for cluster in clusters]
    return ClusterSpec({job: _join_job(job, [spec[job] for spec in described if job in spec]) for job in jobs})


def _join_job(job: str, parts: list[list[str] | dict[int, str]]) -> list[str] | dict[int, str]:
    lists = [part for part in parts if isinstance(part, list)]
    if len(lists) == len(parts):
        return [address for part in lists for address in part]
    joined: dict[int, str] = {}
    for part in parts:
        for index, address in _items(part):
            if index in joined:
                raise _clash(job, index, joined[index], address)
            joined[index] = address
    return joined


def _items(part: list[str] | dict[int, str]) -> Iterable[tuple[int, str]]:
    return enumerate(part) if isinstance(part, list) else part.items()


def _not_resolvers(strangers: Sequence[object]) -> ClusterTypeError:
    return ClusterTypeError(
        message(
            "`UnionResolver(...)` got arguments that are not resolvers",
            [f"{stranger!r} of type {type(stranger).__name__}" for stranger in strangers],
            instead=["wrap a cluster that you have as data: `SimpleClusterResolver(cluster_spec)`"],
        )
    )


def _unknown_words(words: Iterable[str]) -> ClusterTypeError:
    return ClusterTypeError(
        message(
            "`UnionResolver(...)` got keyword arguments that it does not have",
            [f"{word}=" for word in words],
            instead=["the resolvers by position, and `task_type`, `task_id` or `rpc_layer` for this process"],
        )
    )


def _clash(job: str, index: int, first: str, second: str) -> TaskClashError:
    return TaskClashError(
        message(
            f"`UnionResolver(...).cluster_spec()`: task {index} of job {job!r} is described twice",
            [f"first {first!r}", f"then {second!r}"],
            "One of the resolvers names the numbers of its tasks, so none of them may be moved.",
            ["give each task a number of its own", "give lists in all resolvers, which are put one after the other"],
        )
    )
