"""What do the 2018 names refuse, and in which words?"""

from __future__ import annotations

from typing import Any

from replicax._errors import (
    ClusterError,
    ContextError,
    DeviceError,
    InputError,
    LocalityError,
    NotADatasetError,
    NotAvailableError,
    ReduceOpError,
    message,
)


class NotMirroredError(LocalityError, AssertionError):
    """A value that differs per tower where one that is the same on all of them is needed."""


class NoDevicesError(DeviceError, AssertionError):
    """A list of devices without a device in it."""


def needs_scope(call: str, strategy: Any) -> ContextError:
    return ContextError(
        message(
            f'Need to be inside "with distribution_strategy.scope()" for `{call}` of {strategy!r}',
            why="What speaks for all towers works in the strategy's own scope only; the bare top level is the one "
            "tower of the default strategy.",
            instead=["with distribution_strategy.scope(): ...", "the methods of an rx.Strategy work at top level too"],
        )
    )


def wrong_tower(wanted: Any, active: Any) -> ContextError:
    if active is None:
        return ContextError(
            "Need to be inside `call_for_each_tower()`: a TowerContext was used where code runs once for all towers. "
            "Use it in the function given to `call_for_each_tower`, and call get_tower_context() there."
        )
    if active.distribution_strategy is not wanted.distribution_strategy:
        return ContextError(
            message(
                "Mismatching DistributionStrategy objects: a TowerContext of one strategy in a tower of another",
                [f"context  {wanted.distribution_strategy!r}", f"running  {active.distribution_strategy!r}"],
                instead=["call get_tower_context() where you need it"],
            )
        )
    return ContextError(
        "Mismatching tower context: this TowerContext is not that of the call under way. Call get_tower_context() "
        "where you need it instead of keeping it."
    )


def no_engine(strategy: Any) -> NotAvailableError:
    return NotAvailableError(
        f"{type(strategy).__name__}() places nothing: it is what all strategies have in common. Make one that does, "
        "tower.MirroredStrategy() or tower.OneDeviceStrategy('cpu:0') say."
    )


def not_a_reduction(word: Any) -> ReduceOpError:
    return ReduceOpError(
        message(
            f"{word!r} says nothing about how to combine values over towers",
            instead=[
                "VariableAggregation.SUM, MEAN or ONLY_FIRST_TOWER",
                '"sum" or "mean"',
            ],
        )
    )


class WhichReductionError(ReduceOpError, TypeError):
    """No word says how to combine values, or several do."""


def which_reduction(given: dict[str, Any]) -> ReduceOpError:
    return WhichReductionError(
        "reduce(aggregation, value, destinations) takes one aggregation, under one of the names it has had "
        f"(aggregation, method_string, reduce_op), and was given {given or 'none'}."
    )


def missing_argument(call: str, argument: str) -> TypeError:
    return TypeError(f"{call} is missing its argument {argument!r}.")


class NothingToReduceError(InputError, AssertionError):
    """What `map` returned for no items was to be combined."""


def nothing_to_reduce() -> InputError:
    return NothingToReduceError("reduce(...) of what `map` returned for no items: there is nothing to combine.")


def not_mirrored(call: str, value: Any) -> NotMirroredError:
    return NotMirroredError(
        message(
            f"`{call}` got a value that differs per tower",
            [" ".join(repr(value).split())],
            "One value is needed: which of these is it?",
            ["distribution.reduce('mean', value)", "distribution.unwrap(value)[0]"],
        )
    )


def no_devices() -> NoDevicesError:
    return NoDevicesError("MirroredStrategy(devices=[]): it needs at least one device. Leave `devices` out for all.")


def no_count(count: Any) -> DeviceError:
    return DeviceError(f"num_gpus={count!r}: say how many GPUs to use, 0 for the CPU.")


def too_few_gpus(count: int) -> DeviceError:
    return DeviceError(
        message(
            f"num_gpus={count} asks for more GPUs than this process has",
            instead=[
                "num_gpus=0 for one CPU",
                'name devices: tower.MirroredStrategy(devices=["cpu:0", "cpu:1"]); rx.host.configure makes several CPUs',
            ],
        )
    )


def no_algorithm(given: Any) -> ReduceOpError:
    return ReduceOpError(f'AllReduceCrossTowerOps(all_reduce_alg={given!r}): write "nccl" or "hierarchical_copy".')


def no_whole_number(argument: str, given: Any) -> ReduceOpError:
    return ReduceOpError(f"AllReduceCrossTowerOps({argument}={given!r}): a whole number, 0 for none.")


def two_ways(call: str, first: str, second: str) -> ValueError:
    return InputError(f"{call}({first}=..., {second}=...): both say the same thing and may disagree. Pass one of them.")


def two_cross_tower_ops() -> ReduceOpError:
    return ReduceOpError(
        "MirroredStrategy(cross_tower_ops=..., cross_device_ops=...): two names of one argument. Pass one of them."
    )


def unsupported_by_default(what: str) -> ContextError:
    return ContextError(
        f"`{what}` of the default strategy: it is unsupported by default, as the default strategy places nothing. Make "
        "one that does, tower.OneDeviceStrategy('cpu:0') say."
    )


def default_has_none(what: str) -> NotAvailableError:
    return NotAvailableError(
        f"`{what}` must be answered by a strategy, and the default strategy does not. Ask has_distribution_strategy() "
        "before."
    )


def not_a_dataset_function(given: Any) -> NotADatasetError:
    return NotADatasetError(
        message(
            "distribution.distribute_dataset(dataset_fn): dataset_fn is not callable",
            [" ".join(repr(given).split())[:120]],
            "Each worker makes the dataset for itself, so a function is asked for it.",
            ["distribution.distribute_dataset(lambda: dataset)"],
        )
    )


def not_available(call: str, why: str, *instead: str) -> NotAvailableError:
    return NotAvailableError(message(f"`{call}` is not available", why=why, instead=instead))


def needs_tower(call: str) -> ContextError:
    return ContextError(f"Need to be inside `call_for_each_tower()`: `{call}` is for code that runs for one tower.")


def no_task(strategy: str) -> ClusterError:
    return ClusterError(
        f"{strategy}.configure(cluster_spec=...): When `cluster_spec` is given, you must also specify `task_type` and "
        "`task_id`, which say who in the cluster this process is."
    )


def no_job(strategy: str, needs: str, jobs: Any) -> ClusterError:
    return ClusterError(f"{strategy}: the cluster has no job {needs!r}; its jobs are {list(jobs)}.")


def wrong_task(strategy: str, task_type: str, jobs: Any) -> ClusterError:
    return ClusterError(
        f"{strategy}.configure(task_type={task_type!r}): a chief or a worker trains; the jobs are {list(jobs)}."
    )
