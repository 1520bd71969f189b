"""What can go wrong, and what should the user do about it?

Every refusal says four things: the call, in the user's words; each bad leaf or number; why it cannot work; what to
write instead. `message` lays them out. The classes come first; below them stand builders, functions that *return* an
error, so that the code that checks reads `raise uneven_batch(...)` and stays short.
"""

# Whoever catches `ReplicaxError` catches all of them; whoever ported code that catches a built-in still catches it.
#
# ReplicaxError
# ├── ContextError          RuntimeError          called across replicas, inside one or while updating: the wrong place
# ├── LocalityError         TypeError             a value that differs between replicas where one value is needed
# ├── StaticArgumentError   TypeError             a traced number used as a Python value
# ├── StructureError        AssertionError,       the replicas handed back trees of different shape
# │                         ValueError
# ├── InputError            ValueError            a batch or dataset that cannot be split over the replicas
# ├── DeviceError           ValueError            a word that names no device here
# │   └── DeviceSpecError   AssertionError        a word or a list of words that breaks a rule of its own
# ├── VariableError         ValueError            a variable made or assigned in a way that its kind does not allow
# ├── OutOfRangeError       IndexError            the data has come to its end
# ├── CheckpointError       RuntimeError          a checkpoint that is damaged, incomplete or of another program
# ├── ClusterError          ValueError            a description of a job that cannot be right
# │   ├── ClusterTypeError  TypeError             one that is not made of names, numbers and addresses
# │   └── TaskClashError    KeyError              one task number that two descriptions give away
# ├── SchedulerError        RuntimeError          a scheduler whose word is missing or contradicts itself
# ├── TopologyError         ValueError            chips and cores that do not lie the way they are said to lie
# ├── HostError             RuntimeError          a process that is set up so that it would hang or crawl
# └── NotAvailableError     NotImplementedError   a name that exists and cannot do its work here

import math
from collections.abc import Iterable, Sequence
from typing import Any


class ReplicaxError(Exception):
    """Anything replicax refuses to do; the message says what to write instead."""


class ContextError(ReplicaxError, RuntimeError):
    """A call that is right somewhere else: across replicas, inside one, or in an update function."""


class LocalityError(ReplicaxError, TypeError):
    """A value that differs between replicas stands where all replicas must agree, or the other way round."""


class StaticArgumentError(ReplicaxError, TypeError):
    """A number that is an argument of a compiled step was used as a Python value, say as a shape or in an `if`."""


class StructureError(ReplicaxError, AssertionError, ValueError):
    """The replicas returned trees that do not match, so their leaves cannot be put together."""


class InputError(ReplicaxError, ValueError):
    """A batch or a dataset cannot be handed out to the replicas as it is."""


class ComponentsError(InputError):
    """A value per replica of a strategy with another number of replicas."""


class DeviceError(ReplicaxError, ValueError):
    """A device was named that this process does not have."""


class DeviceSpecError(DeviceError, AssertionError):
    """A device string in a spelling that is not allowed, or a list that names a device twice."""


class VariableError(ReplicaxError, ValueError):
    """A variable was created, read or assigned in a way that its synchronization and aggregation do not allow."""


class VariableTypeError(VariableError, TypeError):
    """A variable was given something that is no array, or used as a list."""


class OutOfRangeError(ReplicaxError, IndexError):
    """The dataset has no further element."""


class CheckpointError(ReplicaxError, RuntimeError):
    """A checkpoint is damaged, incomplete, or does not belong to these objects."""


class HostError(ReplicaxError, RuntimeError):
    """This process was set up so that several devices in it would hang, and it is too late to change that from here."""


class NotAvailableError(ReplicaxError, NotImplementedError):
    """A name that exists so that programs can be read and ported, and that cannot do its work here."""


def message(call: str, bad: Iterable[str] = (), why: str = "", instead: Iterable[str] = ()) -> str:
    """Lays out the four parts of an error, in the order in which a reader needs them.

    Args:
      call: The headline: the user's call in the user's words, and what is wrong with it. No full stop.
      bad: One line for each offending leaf, device or number.
      why: Whole sentences: why it cannot work.
      instead: What to write; each a phrase that works if pasted. No full stop.

    Example:
      >>> from replicax._errors import message
      >>> print(message(
      ...     "`strategy.run(step, ...)` got a batch that does not split evenly over its 8 replicas",
      ...     ["batch['image']  float32[100,28,28]  100 rows = 8 x 12 + 4 left over"],
      ...     "Every replica runs the same program, so every replica needs the same number of rows.",
      ...     ["use a global batch of 96 or 104", "let replicax pad it: `strategy.distribute_dataset(batches)`"],
      ... ))
      `strategy.run(step, ...)` got a batch that does not split evenly over its 8 replicas:
      <BLANKLINE>
        batch['image']  float32[100,28,28]  100 rows = 8 x 12 + 4 left over
      <BLANKLINE>
      Every replica runs the same program, so every replica needs the same number of rows. Do one of these:
        * use a global batch of 96 or 104;
        * let replicax pad it: `strategy.distribute_dataset(batches)`.
    """
    bad, instead = list(bad), list(instead)
    blocks = [call + (":" if bad else ".")]
    if bad:
        blocks.append("\n".join(f"  {line}" for line in bad))
    blocks.append(" ".join(part for part in (why, _ways_out(instead)) if part))
    return "\n\n".join(block for block in blocks if block)


def _ways_out(instead: list[str]) -> str:
    if not instead:
        return ""
    lead = "Do this:" if len(instead) == 1 else "Do one of these:"
    return lead + "\n" + ";\n".join(f"  * {line}" for line in instead) + "."


class ClusterError(ReplicaxError, ValueError):
    """Who is in the job was said in a way that cannot be right: an unknown job, a task that is not there."""


class ClusterTypeError(ClusterError, TypeError):
    """A cluster must be made of job names, task numbers and addresses, and this is not."""


class TaskClashError(ClusterError, KeyError):
    """Two descriptions of one cluster give the same task number to different addresses."""

    __str__ = Exception.__str__  # KeyError would print the message in quotes, on one line


class SchedulerError(ReplicaxError, RuntimeError):
    """What the scheduler of this job says is missing, contradicts itself or contradicts the arguments."""


class TopologyError(ReplicaxError, ValueError):
    """Cores that do not lie in the mesh, or an assignment of replicas to cores that does not fit it."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """A saved value has another shape or dtype than the object it should go into."""


class CheckpointDamagedError(CheckpointError):
    """The files of a checkpoint are not those that were saved: changed, cut short, removed, or the save never ended."""


class NotConsumedError(CheckpointError, AssertionError):
    """A restore left saved values unused or objects without a value, and the caller had asked for neither."""


class NotADatasetError(InputError, TypeError):
    """What was given as a dataset cannot be gone through batch by batch."""


class NotACountError(InputError, TypeError):
    """A number of rows was asked for, and this is none."""


class AmbiguousSumError(LocalityError, AssertionError, ValueError):
    """A sum over replicas of a value that is the same on each: one copy, or N of them?"""


class PerReplicaUseError(LocalityError, ValueError):
    """A value per replica was used as one array."""


# -- Where in the program am I?


def needs_scope(call: str, strategy: Any) -> ContextError:
    return ContextError(
        message(
            f'Need to be inside "with strategy.scope()" for {call} of {strategy!r}',
            why="The default strategy is in force here.",
            instead=["with strategy.scope(): ..."],
        )
    )


def mixed_strategies(call: str, wanted: Any, active: Any) -> ContextError:
    return ContextError(
        message(
            f"Mixing different tf.distribute.Strategy objects: {call} belongs to one strategy and another is in force",
            [f"called on  {wanted!r}", f"in force   {active!r}"],
            "Two strategies lay values and variables out differently, so a value of one is no value of the other.",
            [
                *_made_outside(wanted),
                "leave the inner `with other.scope():` block first",
                "use one strategy object throughout",
            ],
        )
    )


def _made_outside(owner: Any) -> list[str]:
    """What to write about something that was made where no strategy was in force."""
    outside = type(owner).__name__ == "DefaultStrategy"
    return ["make it under the scope of the strategy that uses it: `with strategy.scope():`"] * outside


def needs_cross_replica(call: str) -> ContextError:
    return ContextError(
        message(
            f"{call} inside a replica: Method requires being in cross-replica context, use "
            "get_replica_context().merge_call()",
            why="Code inside `strategy.run(step)` runs for one replica; this call speaks for all of them.",
            instead=[
                "rx.get_replica_context().all_reduce(op, value) to combine values",
                "rx.get_replica_context().merge_call(fn, args) to run `fn(strategy, *args)` once for all replicas",
                "return the value from the step and make the call after `run`",
            ],
        )
    )


def gather_in_replica() -> ContextError:
    return ContextError(
        message(
            "strategy.gather(...) inside a replica",
            why="It speaks for all replicas, and this code runs for one.",
            instead=["rx.get_replica_context().all_gather(value, axis)"],
        )
    )


def nested_default_scope(active: Any) -> ContextError:
    return ContextError(
        message(
            "Must not nest tf.distribute.Strategy scopes: the default strategy's scope was entered inside another's",
            [f"in force   {active!r}"],
            "The default strategy is what is in force where no other is.",
            ["leave the `with strategy.scope():` block"],
        )
    )


def scope_nesting(what: str) -> RuntimeError:
    return ContextError(
        f"{what} scope nesting error: a {what.lower()} scope that was opened inside `with strategy.scope():` is still "
        "open. Close it before the strategy's scope ends; leaving the scope can then be tried again."
    )


def scope_not_entered(strategy: Any) -> ContextError:
    return ContextError(f"The scope of {strategy!r} was left more often than it was entered on this thread.")


def not_a_strategy(strategy: Any) -> TypeError:
    return TypeError(
        f"rx.experimental_set_strategy({_short(strategy)}): expected a strategy, or None for the default one."
    )


def set_strategy_in_scope() -> ContextError:
    return ContextError(
        "Must not be called inside a `tf.distribute.Strategy` scope: rx.experimental_set_strategy(...) while "
        "`with strategy.scope():` or a run is under way. Leave it first."
    )


def replica_alone(what: str, strategy: Any) -> ContextError:
    return ContextError(
        message(
            f"`{what}` in a replica context that was entered by hand",
            [f"{strategy!r} has {strategy.num_replicas_in_sync} replicas"],
            "Outside of a run the other replicas are not there to be met.",
            ["strategy.run(step), and in the step rx.get_replica_context()"],
        )
    )


def no_such_replica(index: int, strategy: Any) -> InputError:
    return InputError(
        message(
            f"The replica context of replica {index} has no devices",
            [f"{strategy!r} has {strategy.num_replicas_in_sync} replicas"],
            instead=[f"rx.ReplicaContext(strategy, i) with i from 0 to {strategy.num_replicas_in_sync - 1}"],
        )
    )


def wrong_replica_context(what: str, asked: Any, active: Any) -> ContextError:
    if active is None:
        return ContextError(
            f"Need to be inside `call_for_each_replica()`: `{what}` of a replica context was used where code runs once "
            "for all replicas. Use it in the function given to `strategy.run`, and there call "
            "rx.get_replica_context() afresh."
        )
    if active.strategy is not asked.strategy:
        return ContextError(
            f"Mismatching tf.distribute.Strategy objects: `{what}` of a replica context of {asked.strategy!r} inside a "
            f"run of {active.strategy!r}."
        )
    return ContextError(
        f"Mismatching ReplicaContext: `{what}` of a context that is not the one in force here. Call "
        "rx.get_replica_context() where you need it instead of keeping it."
    )


# -- Values


def per_replica_as_array(value: Any) -> PerReplicaUseError:
    return PerReplicaUseError(
        message(
            "It looks like you are using a PerReplica object while not inside a replica context: it holds one value "
            "for each replica and cannot stand for a single array",
            why="Which of them is meant, or how should they be combined?",
            instead=[
                'strategy.reduce("mean", value) combines them',
                "strategy.experimental_local_results(value) lists them",
                "strategy.run(fn, args=(value,)) gives each replica its own",
            ],
        )
    )


def attribute_of_per_replica(name: str) -> AttributeError:
    first = "np.asarray(value.values[0])" if name == "numpy" else f"value.values[0].{name}"
    return AttributeError(
        message(
            f"A PerReplica has no `{name}`: it holds one value for each replica",
            instead=[
                f"{first} is that of the first replica's",
                'strategy.reduce("mean", value) and strategy.gather(value, axis=0) make one array of all',
            ],
        )
    )


def captured_per_replica(value: Any) -> InputError:
    return InputError(
        message(
            "A step uses a per-replica value that it captured and did not get as an argument",
            [_short(value)],
            "A step may capture its component where all of the replicas are in this process and no row is padding: of what "
            "is captured, only the numbers become part of the program.",
            ["strategy.run(step, args=(value,))"],
        )
    )


def components_of_traced(array: Any) -> PerReplicaUseError:
    return PerReplicaUseError(
        message(
            "The components of a value per replica were asked for inside jax.jit or another traced function",
            [f"{array.dtype}{list(array.shape)}, of all replicas together"],
            "Where each replica's part lies is known outside only.",
            [
                "strategy.reduce(op, value) and strategy.gather(value, axis) work inside",
                "list the components outside: strategy.experimental_local_results(value)",
            ],
        )
    )


def different_structures(trees: Sequence[Any]) -> StructureError:
    return StructureError(
        message(
            "The replicas returned different structures",
            [f"replica {i}  {_short(tree)}" for i, tree in enumerate(trees)],
            "Their results are merged entry by entry.",
            ["return the same keys, and lists of the same length, on every replica"],
        )
    )


def ambiguous_sum(value: Any, replicas: int) -> AmbiguousSumError:
    return AmbiguousSumError(
        message(
            'strategy.reduce("sum", x): A non-DistributedValues value cannot be reduced with the given reduce op',
            [f"x = {_short(value)}, the same on all {replicas} replicas"],
            f"Its sum over replicas could mean x, counted once, or {replicas}*x, counted on each.",
            ["use x itself", f"write x * strategy.num_replicas_in_sync for {replicas}*x"],
        )
    )


def ragged_reduce(op: Any, arrays: Sequence[Any]) -> StructureError:
    return StructureError(
        message(
            f'strategy.reduce("{op.name.lower()}", value) of values of different shape',
            [f"replica {i}  {_short(array)}" for i, array in enumerate(arrays)],
            "They are combined element by element.",
            [f'strategy.reduce("{op.name.lower()}", value, axis=0) reduces the uneven axis as well'],
        )
    )


def of_other_replicas(call: str, value: Any, placement: Any, name: str = "value") -> ComponentsError:
    if value.form == "parts":
        there = f"{len(value.data)} components"
    else:
        mesh = value.data.sharding.mesh
        there = f"{mesh.shape['replica']} replicas, on {', '.join(map(str, mesh.devices.flat))}"
    return ComponentsError(
        message(
            f"{call} got a per-replica value of other replicas than the strategy's",
            [
                f"{name}  {there}",
                f"strategy  {placement.replicas} replicas, on {', '.join(map(str, placement.mesh.devices.flat))}",
            ],
            "Each of the strategy's replicas has one component. Either the value was made by another strategy, or an "
            "rx.function that calls none was called outside of strategy.scope().",
            [
                "combine it with the strategy that made it",
                "make it with the strategy that runs the step, one component for each replica",
            ],
        )
    )


def no_components() -> InputError:
    return InputError(
        message(
            "A reduction or a gather of a per-replica value of no replicas",
            ["rx.PerReplica(())"],
            "Nothing has no sum and no shape.",
            ["rx.PerReplica((value of replica 0, value of replica 1, ...))"],
        )
    )


def slices_of_no_rows(values: Any, indices: Any, dense_shape: tuple[int, ...]) -> InputError:
    rows = "x".join(map(str, dense_shape[1:])) or "single numbers"
    return InputError(
        message(
            "IndexedSlices.to_dense() of values and indices that do not belong together",
            [f"values       {_short(values)}", f"indices      {_short(indices)}", f"dense_shape  {dense_shape}"],
            f"values[i] is the row {rows} at indices[i].",
            ["rx.IndexedSlices(values, indices, dense_shape) with one index for each of `values`"],
        )
    )


def not_components(data: Any) -> InputError:
    return InputError(
        message(
            "rx.PerReplica(components) takes a tuple with the component of each replica",
            [f"{type(data).__name__}: {_short(data)}"],
            instead=["rx.PerReplica((1.0, 2.0))", "rx.PerReplica(tuple(values))"],
        )
    )


def not_laid_out(data: Any) -> InputError:
    return InputError(
        message(
            "The components of a per-replica value cannot be told apart: its array does not lie over the replicas",
            [f"{type(data).__name__}: {_short(data)}"],
            "jax.device_get, jax.device_put and functions that change the number of its rows take it off them.",
            [
                "take the components first: strategy.experimental_local_results(value)",
                "compute in a step: strategy.run(fn, args=(value,))",
            ],
        )
    )


def nothing_to_compare(op: Any, array: Any) -> InputError:
    return InputError(
        message(
            f'strategy.reduce("{op.name.lower()}", value, axis=...) along axes without elements',
            [f"each replica's value  {_short(array)}"],
            "Nothing has no smallest and no largest.",
            ["leave the empty axis out", '"sum" or "mean", which are 0 and nan'],
        )
    )


def gather_shapes(what: str, arrays: Sequence[Any]) -> InputError:
    return InputError(
        message(
            f"Shape mismatch: strategy.gather(...) of values of different {what}; all axes but one must be equal",
            [f"replica {i}  {_short(array)}" for i, array in enumerate(arrays)],
            "They are concatenated along that one axis.",
        )
    )


def slices_op(op: Any) -> NotImplementedError:
    return NotImplementedError(
        f"A {op.name} of IndexedSlices: rows that no replica sent would count as zeros or not at all. Reduce them with "
        '"sum" or "mean", or reduce `slices.to_dense()`.'
    )


def slices_axis() -> NotImplementedError:
    return NotImplementedError("strategy.reduce(..., axis=...) of IndexedSlices. Reduce `slices.to_dense()`.")


# -- Arguments of a step


# Of the next three, `call` is what the user wrote with {} for the arguments, and `name` what its function is called.


def arguments_not_a_list(call: str, name: str, args: Any) -> InputError:
    return InputError(
        message(
            f"{call.format(f'{name}, args={_short(args)}')}: positional args must be a list or tuple",
            why=f"`args` holds one entry for each argument of `{name}`.",
            instead=[call.format(f"{name}, args=(x,)")],
        )
    )


def not_a_function(call: str, name: str, fn: Any) -> StaticArgumentError:
    return StaticArgumentError(
        message(
            f"{call.format(f'{_short(fn)}, ...')}: the {name} is not a function",
            [f"it is of type {type(fn).__name__}"],
            instead=[f"{call.format(name)}, without calling `{name}` yourself"],
        )
    )


def keywords_not_a_mapping(call: str, name: str, kwargs: Any) -> InputError:
    return InputError(
        message(
            f"{call.format(f'{name}, args, kwargs={_short(kwargs)}')}: keyword args must be a dictionary",
            instead=[call.format(name + ', args=(x,), kwargs={"training": True}')],
        )
    )


def not_run_options(options: Any) -> TypeError:
    return StaticArgumentError(
        message(
            f"strategy.run(step, ..., options={_short(options)}): not an rx.RunOptions",
            instead=["options=rx.RunOptions(eager=True)"],
        )
    )


def iterator_as_argument(fn: Any, path: str) -> InputError:
    return InputError(
        message(
            f"`{_name(fn)}` got an iterator as {path}",
            why="A compiled function reads while it is traced, once, and would see the same element ever after; replicas "
            "that run line by line would take elements from each other.",
            instead=["read first and pass the element: `strategy.run(step, args=(next(iterator),))`"],
        )
    )


def variable_without_value(variable: Any) -> VariableError:
    return VariableError(
        message(
            f"The variable {variable.name!r} has no value",
            why="It was made in a step that failed before its first value was computed, or its array was deleted.",
            instead=["make it anew", "make it before the step, in strategy.scope()"],
        )
    )


def number_too_large(fn: Any, path: str, value: int, limits: Any) -> InputError:
    return InputError(
        message(
            f"`{_name(fn)}` got a number that does not fit into {limits.dtype}",
            [f"{path} = {value}, and the largest is {limits.max}"],
            "Python's integers have no limit; on a device they have one.",
            ["pass a float", 'jax.config.update("jax_enable_x64", True)'],
        )
    )


def deleted_argument(fn: Any, path: str, value: Any) -> InputError:
    return InputError(
        message(
            f"`{_name(fn)}` got an array whose buffer is gone: it has been deleted",
            [f"{path}  {value.dtype}{list(value.shape)}"],
            "It was donated to an earlier step, which was allowed to reuse its memory.",
            [
                "go on with what that step returned",
                "leave it out of rx.RunOptions(donate=...) to keep it",
            ],
        )
    )


def deleted_value(value: Any) -> InputError:
    return InputError(
        message(
            "A value per replica was read after its buffer is gone: it has been deleted",
            [f"{value.dtype}{list(value.shape)}"],
            "It was donated to a step, which was allowed to reuse its memory.",
            ["go on with what that step returned", "leave it out of rx.RunOptions(donate=...) to keep it"],
        )
    )


def donated_twice(fn: Any, places: Sequence[str]) -> InputError:
    return InputError(
        message(
            f"`{_name(fn)}` is given one array several times and may reuse its memory",
            [f"{place}" for place in places],
            "The buffer of a donated argument is overwritten, and the others would read what it was overwritten with.",
            ["pass a copy: jnp.copy(x)", "leave it out of rx.RunOptions(donate=...)"],
        )
    )


def donated_position(donate: Sequence[int], count: int) -> InputError:
    return InputError(
        message(
            f"RunOptions(donate={tuple(donate)}) for a call with {count} positional arguments",
            why="Each number is the position of an argument, counted from 0.",
            instead=[f"positions from 0 to {count - 1}" if count else "leave `donate` out"],
        )
    )


def not_a_tree(what: str, error: Exception) -> StructureError:
    return StructureError(
        message(
            f"{what[0].upper()}{what[1:]} of a step is a structure that cannot be taken apart",
            [str(error).split("\n", 1)[0]],
            "The entries of a dictionary are ordered by their keys.",
            ["use keys that can be compared with each other, all text say"],
        )
    )


def hidden_arrays(fn: Any, value: Any, names: Sequence[str]) -> StructureError:
    return StructureError(
        message(
            f"`{_name(fn)}` returns an object that holds arrays of the step and that JAX cannot look into",
            [f"{type(value).__name__}.{name}" for name in names],
            "Only arrays that the step returns, by themselves or in structures that JAX knows, become values.",
            [
                "return a tuple or a dictionary",
                f"register the class: jax.tree_util.register_dataclass({type(value).__name__})",
            ],
        )
    )


def body_not_run(fn: Any, kind: str) -> TypeError:
    return StaticArgumentError(
        message(
            f"`{_name(fn)}` returned {kind}: its body has not run",
            why=f"Calling {'a function with `yield`' if 'generator' in kind else 'an `async def`'} only prepares it; "
            "nobody would carry it out.",
            instead=["return the values of the step with `return`"],
        )
    )


def eager_under_transformation(fn: Any) -> ContextError:
    return ContextError(
        message(
            f"`{_name(fn)}` was to be run line by line inside jax.jit, jax.grad, jax.vmap or the like",
            why="Line by line each replica computes with real numbers, and a transformation has none.",
            instead=[
                "transform inside the step: strategy.run(lambda x: jax.grad(loss)(x), (x,))",
                "run it compiled: a strategy without eager=True",
            ],
        )
    )


def assigned_under_transformation(variable: Any) -> ContextError:
    return ContextError(
        message(
            f"A run inside jax.vmap or jax.grad assigns to the variable {variable.name!r} a value that is transformed",
            why="Outside of the transformation there is no such value that the variable could keep.",
            instead=["transform inside the step", "return the value instead of assigning it"],
        )
    )


def unhashable_argument(path: str, leaf: Any) -> StaticArgumentError:
    return StaticArgumentError(
        message(
            "strategy.run(step, ...) got an argument that is neither an array nor hashable",
            [f"{path}  {type(leaf).__name__}"],
            "Arrays and numbers are traced; every other object becomes part of the program and must be hashable so that "
            "the program can be found again.",
            ["let the step reach it by closure", "register its class with jax.tree_util so that its arrays are seen"],
        )
    )


def no_array_of_jax(path: str, leaf: Any) -> InputError:
    return InputError(
        message(
            "strategy.run(step, ...) got an array that JAX cannot hold",
            [f"{path}  {_short(leaf)}"],
            "A compiled step computes with numbers. Text, dates and Python objects stay on the host.",
            [
                "take it out of the batch before the step: `ids = batch.pop('id')`",
                "turn it into numbers: `np.unique(x, return_inverse=True)[1]`, or `x.astype(...)`",
            ],
        )
    )


def ragged_argument(path: str, value: Any) -> InputError:
    return InputError(
        message(
            "strategy.run(step, ...) got a per-replica value whose components differ in shape or are no arrays of numbers",
            [f"{path}  replica {i}  {_short(part)}".strip() for i, part in enumerate(value.data)],
            "The step is compiled once and every replica runs that one program, so their inputs must look alike.",
            [
                "pad them to one shape; strategy.distribute_dataset(batches) does it and keeps count",
                "take text and Python objects out of the batch before the step: `ids = batch.pop('id')`",
                "run it line by line: strategy.run(step, ..., options=rx.RunOptions(eager=True))",
            ],
        )
    )


def traced_value_used(fn: Any, error: Exception, site: Any) -> StaticArgumentError:
    where = f" at {site}" if site is not None else ""
    return StaticArgumentError(
        message(
            f"`{_name(fn)}` uses an argument or a computed value as a Python value{where}",
            [str(error).split("\n", 1)[0]],
            "A compiled step is traced with abstract values: numbers passed as arguments may change from call to call "
            "without a new compilation, so their value is not known while the step is traced.",
            [
                "bind it: strategy.run(functools.partial(step, n=3), args=(x,))",
                "use jnp.where or jax.lax.cond instead of `if`",
                "look at it line by line: strategy.run(step, ..., options=rx.RunOptions(eager=True))",
            ],
        )
    )


def formatted(fn: Any, error: Exception, site: Any) -> StaticArgumentError:
    return StaticArgumentError(
        message(
            f"`{_name(fn)}` writes a number as text at {site}",
            [str(error).split("\n", 1)[0]],
            "A compiled step is traced with abstract values: there is no number yet.",
            [
                'jax.debug.print("{:.2f}", x), which prints when the step runs',
                "look at it line by line: strategy.run(step, ..., options=rx.RunOptions(eager=True))",
            ],
        )
    )


def boolean_index(fn: Any, error: Exception, site: Any) -> StaticArgumentError:
    return StaticArgumentError(
        message(
            f"`{_name(fn)}` picks elements by a mask at {site}",
            [str(error).split("\n", 1)[0]],
            "How many there are is not known while the step is traced, and every array of a compiled step has one shape.",
            [
                "jnp.where(mask, x, 0) keeps the shape",
                "x.sum(where=mask), x.mean(where=mask) leave the others out",
                "look at it line by line: strategy.run(step, ..., options=rx.RunOptions(eager=True))",
            ],
        )
    )


def unknown_axis(fn: Any, error: Exception, site: Any) -> ContextError:
    return ContextError(
        message(
            f"`{_name(fn)}` speaks over an axis that does not exist at {site}",
            [str(error).split(".", 1)[0]],
            "A step runs over one axis of replicas; only `jax.vmap(..., axis_name=...)` adds another.",
            [
                'rx.get_replica_context().all_reduce("mean", x)',
                'jax.lax.pmean(x, "replica"): the axis is called "replica"',
            ],
        )
    )


def devices_of_its_own(fn: Any, error: Exception, site: Any) -> ContextError:
    return ContextError(
        message(
            f"`{_name(fn)}` spreads work over devices by itself at {site}",
            [str(error).split("\n", 1)[0]],
            "A step is one replica's work, on its own devices; jax.pmap and jax.shard_map would take others.",
            [
                "jax.vmap does several things at once on one replica",
                'rx.get_replica_context().all_reduce("sum", x) speaks with the other replicas',
                "rx.MirroredStrategy(replica_mesh={...}) gives each replica several devices",
            ],
        )
    )


def leaked(fn: Any, site: Any, made: str) -> StaticArgumentError:
    return StaticArgumentError(
        message(
            f"`{_name(fn)}` uses a value that another trace has left behind" + (f" at {site}" if site else ""),
            [f"it was made at {made}"] if made else [],
            "While a step, a loop body or a branch is traced there are no numbers, only their descriptions, and those mean "
            "nothing after it. Something (a list, an attribute, a global) has kept one.",
            [
                "return the value and pass it on as an argument",
                "keep it in a variable: variable.assign(x) in one step, variable.value in the next",
                "record it when the step runs: jax.debug.callback(history.append, x)",
            ],
        )
    )


def many_traces(fn: Any, keys: Sequence[Any]) -> str:
    shapes = [" ".join(f"{dtype}{list(shape)}" for shape, dtype, _ in avals) for _, avals in keys]
    return message(
        f"`{_name(fn)}` has been compiled for {len(keys)} kinds of arguments",
        [shape[:160] for shape in shapes[-4:]],
        "Each new shape or dtype costs a trace and a compilation.",
        ["pad to one shape; strategy.distribute_dataset(batches) does"],
    )


def many_copies(fn: Any, count: int, changed: Sequence[str] = ()) -> str:
    code = getattr(fn, "__code__", None)
    where = f" ({code.co_filename}:{code.co_firstlineno})" if code is not None else ""
    if changed:
        return message(
            f"`{_name(fn)}`{where} was compiled {count} times",
            [f"{name}  has another value than when it was compiled" for name in changed],
            "A value that a step takes from its surroundings is a constant of its program.",
            ["pass what changes as an argument: strategy.run(step, args=(x, lr))"],
        )
    return message(
        f"`{_name(fn)}`{where} was made anew and compiled {count} times",
        why="A function made inside the loop that captures a value which changes is another program each time.",
        instead=["define it once, before the loop, and pass what changes as an argument"],
    )


# -- Variables


def synchronization_none(name: str) -> VariableError:
    return VariableError(
        f"`NONE` variable synchronization mode is not supported: rx.Variable(..., name={name!r}). Write "
        'synchronization="on_write" for one common value or "on_read" for one per replica.'
    )


def invalid_mode(what: str, word: Any, name: str, members: Sequence[str]) -> VariableError:
    return VariableError(
        f"Invalid variable {what} mode: {word!r} for variable {name!r}. Write one of "
        + ", ".join(f'"{member.lower()}"' for member in members) + "."
    )  # fmt: skip


def mean_of_integers(name: str, dtype: Any) -> VariableError:
    return VariableError(
        f'rx.Variable(name={name!r}, dtype={dtype}, aggregation="mean"): aggregation=MEAN and a non-floating dtype is '
        'not supported, since a mean of integers is seldom one. Use a float dtype, or aggregation="sum" or '
        '"only_first_replica".'
    )


def no_initial_value(name: str) -> VariableError:
    return VariableError(f"rx.Variable(name={name!r}) needs an initial value: an array, a number or a function.")


def not_an_initial_value(name: str, value: Any, dtype: Any, error: Exception) -> VariableTypeError:
    return VariableTypeError(
        message(
            f"rx.Variable(initial_value, name={name!r}, dtype={dtype!r}): no array can be made of the initial value",
            [f"initial_value  {_short(value)}", str(error).split("\n", 1)[0]],
            "A variable holds an array of numbers, all rows of one length.",
            ["a number, a nested list of numbers, an array, or a function that returns one"],
        )
    )


def initial_shape(name: str, array: Any, shape: Any) -> VariableTypeError:
    return VariableTypeError(
        message(
            f"rx.Variable(initial_value, name={name!r}, shape={shape!r}): the initial value has another shape",
            [f"initial_value  {_short(array)}"],
            instead=["leave `shape` out", "a number, which fills any shape"],
        )
    )


def positional_options(more: Any) -> TypeError:
    return TypeError(
        message(
            "rx.Variable(initial_value, ...) got more than its initial value by position",
            [_short(x) for x in more],
            "tf.Variable takes `trainable` there; words are easier to read.",
            ["rx.Variable(initial_value, trainable=False, name=...)"],
        )
    )


def copied_in_a_run(variable: Any, call: str) -> ContextError:
    return ContextError(
        message(
            f"copy.{call}({variable.name}) inside a run",
            [repr(variable)],
            "The step goes on with the variables that there are, and a copy would miss what it has assigned so far.",
            ["copy it before the run", f"{variable.name}.value is an array, which cannot change"],
        )
    )


def pickled_variable(variable: Any) -> TypeError:
    return TypeError(
        message(
            "A variable cannot be pickled",
            [repr(variable)],
            "It lies on devices of this process, under a strategy of this process.",
            ["rx.Checkpoint(w=w).save(path)", "pickle.dumps(w.numpy())"],
        )
    )


def traced_initial_value(name: str, value: Any) -> VariableError:
    return VariableError(
        message(
            f"rx.Variable(name={name!r}) was given an initial value that is being traced",
            [_short(value)],
            "A variable outlives the program that makes it, so its first value must be known now.",
            ["pass a function: rx.Variable(lambda: jnp.zeros((3,)))", "make the variable outside jax.jit"],
        )
    )


def assigned_shape(variable: Any, array: Any, method: str) -> VariableError:
    new, old = array.shape, variable.shape
    if len(new) <= len(old) and all(a in (1, b) for a, b in zip(reversed(new), reversed(old), strict=False)):
        instead = "jnp.broadcast_to(x, variable.shape)"
    elif array.size == variable.size:
        instead = "x.reshape(variable.shape)"
    else:
        instead = "bring x to the variable's shape first: x.mean(axis=0), say"
    return VariableError(
        message(
            f"`{variable.name}.{method}(x)`: x has another shape than the variable",
            [f"variable {list(old)}", f"x        {list(new)}"],
            "A variable keeps its shape; nothing is broadcast silently.",
            [instead],
        )
    )


def assigned_no_array(variable: Any, value: Any, method: str, error: Exception) -> VariableTypeError:
    return VariableTypeError(
        message(
            f"`{variable.name}.{method}(x)`: x is no array and no number",
            [f"x = {_short(value)}", str(error).split("\n", 1)[0]],
            instead=[f"an array of shape {list(variable.shape)}"],
        )
    )


def variable_item_assigned(variable: Any) -> VariableTypeError:
    return VariableTypeError(
        message(
            f"`{variable.name}[...] = x`: a variable does not support item assignment",
            why="Its value is an array of JAX, which never changes; the variable takes another one.",
            instead=[
                "variable.assign(variable.value.at[index].set(x))",
                "variable.scatter_update(rx.IndexedSlices(x, indices)), for rows",
            ],
        )
    )


def assigned_dtype(variable: Any, array: Any, method: str) -> VariableError:
    return VariableError(
        f"`{variable.name}.{method}(x)`: x is {array.dtype} and the variable {variable.dtype}; converting would drop the "
        "imaginary part. Write x.real, or make the variable complex."
    )


def sum_of_a_number(variable: Any, value: Any, method: str) -> VariableError:
    return VariableError(
        message(
            f"`{variable.name}.{method}({value!r})` with aggregation=SUM: A non-DistributedValues value {value!r} cannot "
            "be reduced with the given reduce op ReduceOp.SUM",
            why="A Python number is the same on every replica: is it meant once, or once for each?",
            instead=[
                f"{variable.name}.{method}(jnp.asarray({value!r})) adds it up over replicas",
                'aggregation="only_first_replica" takes it once',
            ],
        )
    )


def per_replica_assigned(variable: Any, value: Any, method: str) -> LocalityError:
    return PerReplicaUseError(
        message(
            f"`{variable.name}.{method}(x)` across replicas with an x that differs per replica",
            [_short(value)],
            "The copies of the variable would no longer be equal.",
            [
                f'{variable.name}.{method}(strategy.reduce("mean", x))',
                f"assign inside the step, where the aggregation of {variable.name!r} says how to combine",
            ],
        )
    )


def on_read_none(variable: Any) -> VariableError:
    return VariableError(
        f"Could not convert from VariableAggregation.NONE: variable {variable.name!r} is on-read with aggregation NONE, "
        "so its components cannot become one value. Read them one by one with `variable.values`, or make it with "
        'aggregation="sum", "mean" or "only_first_replica".'
    )


def on_read_none_assigned(variable: Any, method: str) -> VariableError:
    return VariableError(
        message(
            f"Could not convert from VariableAggregation.NONE: `{variable.name}.{method}(x)` in cross-replica context would "
            "return the new value, which is not one value",
            [f"{variable!r}"],
            "Nothing says how its components are combined. Nothing has been assigned.",
            [
                f"{variable.name}.{method}(x, read_value=False) gives x to every component",
                'make it with aggregation="sum", "mean" or "only_first_replica"',
            ],
        )
    )


class ComponentlessWriteError(VariableError, RuntimeError):
    """Something was added to an on-read variable where it is not said which component should take it."""


def on_read_sum_from_across(variable: Any, method: str) -> VariableError:
    return ComponentlessWriteError(
        f"SyncOnReadVariable does not support `{method}` in cross-replica context when aggregation is set to "
        f"`VariableAggregation.SUM`: `{variable.name}.{method}(x)`. Which component should take x? Call it inside a "
        f"replica, or write `{variable.name}.assign({variable.name}.value + x)`."
    )


def on_read_of_other_strategy(variable: Any, strategy: Any) -> ContextError:
    return mixed_strategies(f"the on-read variable `{variable.name}`", variable.strategy, strategy)


def foreign_jit(variable: Any, method: str) -> ContextError:
    return ContextError(
        message(
            f"`{variable.name}.{method}` inside jax.jit (or another traced function) that replicax does not run",
            why="JAX would bake the variable's present value into the compiled function, and later assignments would "
            "be ignored without an error.",
            instead=[
                "decorate the function with rx.function, the jit that understands variables",
                "pass `variable.value` as an argument",
            ],
        )
    )


def assigned_in_nested_trace(variable: Any) -> ContextError:
    return ContextError(
        f"`{variable.name}.assign` inside a loop or branch of a function under rx.value_and_grad on the host. Run the "
        "function with strategy.run or rx.function, which keep such assignments."
    )


def not_a_loss(given: Any) -> TypeError:
    return TypeError(
        message(
            "`rx.value_and_grad(f, variables)` takes the function that computes the loss",
            [f"f  {_short(given)}"],
            "There is no tape: what was computed before cannot be differentiated afterwards.",
            ["write the loss as a function: `value, grads = rx.value_and_grad(lambda: loss_of(x, y), [w])()`"],
        )
    )


def not_a_variable(call: str, leaf: Any) -> TypeError:
    return TypeError(
        f"{call}: expected an rx.Variable, got {_short(leaf)}. For gradients with respect to arguments use jax.grad."
    )


# -- Steps that would give wrong numbers


class UnreducedWriteError(LocalityError, ValueError):
    """A value that differs between replicas was written to a variable that has one value for all of them."""


def unreduced_write(fn: Any, variable: Any, site: Any, origin: Any) -> LocalityError:
    return UnreducedWriteError(
        message(
            f"`{_name(fn)}` writes a per-replica value to the mirrored variable {variable.name!r} at {site}",
            [f"it became per-replica at {origin.site}: {origin.why}" if origin.site else f"because {origin.why}"],
            "Each replica would store another number and the copies would drift apart.",
            [
                'reduce it first: rx.get_replica_context().all_reduce("mean", value)',
                'let the variable combine: rx.Variable(..., aggregation="mean") or "sum"',
                'keep one per replica: rx.Variable(..., synchronization="on_read")',
                "rx.assert_mirrored(value), if you know that it is equal everywhere",
            ],
        )
    )


def wrong_collective(fn: Any, finding: Any) -> LocalityError:
    origin = finding.origin
    if finding.kind == "double-reduce":
        return LocalityError(
            message(
                f"`{_name(fn)}` sums a value over the replicas a second time at {finding.site}",
                [f"it was summed or averaged before at {origin.site}"] if origin and origin.site else [],
                why="It was computed from a sum or mean over replicas and nothing per-replica since: another sum "
                "multiplies it by the number of replicas.",
                instead=["drop one of the two reductions", 'use "mean" in the second, which leaves it as it is'],
            )
        )
    became = f"it became per-replica at {origin.site}: {origin.why}" if origin and origin.site else ""
    return LocalityError(
        message(
            f"`{_name(fn)}` lets replicas meet ({finding.spoken}) at {finding.site}, inside a branch or loop whose "
            "condition differs between replicas",
            [became] if became else [],
            "Replicas that do not take the branch would never arrive and the others would wait for ever.",
            [
                'make the condition equal everywhere: all_reduce("max", condition)',
                "move the reduction out of the branch and choose with jnp.where",
            ],
        )
    )


def padded_differently(fn: Any, labels: Sequence[str], counts: Sequence[Sequence[int]], rows: int) -> LocalityError:
    known: dict[tuple[int, ...], str] = {}
    for label, count in zip(labels, counts, strict=True):
        known.setdefault(tuple(count), label)
    return LocalityError(
        message(
            f"`{_name(fn)}` combines rows of several batches, of which different ones are real",
            [f"{label}  {list(count)} of {rows} rows on each replica" for count, label in known.items()],
            "Its masks are found by what a value was computed from, and here that is more than one batch, or out of sight.",
            [
                "take the mean of values that come from one batch, in the step itself: `rx.mean(loss_a) + rx.mean(loss_b)`",
                "say whose rows you ask about: `rx.valid_rows(images)`",
                "make them one dataset, of batches that match: `strategy.distribute_dataset(zip(a, b))`",
            ],
        )
    )


def averages_padding(fn: Any, site: Any, counts: Any, rows: int) -> LocalityError:
    padded = [
        f"replica {i}  {count} of {rows} rows are real" for i, count in enumerate(map(int, counts)) if count < rows
    ]
    instead = [
        "rx.mean(per_example_loss), the mean over the real rows",
        "rx.valid_rows(), a mask of the real rows, or rx.metrics",
        "drop the short batch: from_arrays(..., drop_remainder=True)",
    ]
    if rows == 1 and not site.line:  # no line of the user's: the example had no row axis when the step got it
        instead = ["batch single examples, so that they are rows: `.batch(1)`", *instead[1:]]
    where = f" at {site}" if site.line else ""
    return LocalityError(
        message(
            f"`{_name(fn)}` combines the rows of a padded batch{where} without asking which of them are real",
            padded or ["this batch is full; the last one of the dataset is short"],
            "Padding would count as data.",
            instead,
        )
    )


def _name(fn: Any) -> str:
    return getattr(fn, "__name__", None) or getattr(getattr(fn, "func", None), "__name__", None) or type(fn).__name__


def _short(value: Any) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        return f"{dtype}{list(shape)}"
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


def per_replica_initial_value(fn: Any, variable: Any, origin: Any) -> LocalityError:
    return LocalityError(
        message(
            f"`{_name(fn)}` makes the variable {variable.name!r} from a value that differs between replicas",
            [f"it became per-replica at {origin.site}: {origin.why}" if origin.site else f"because {origin.why}"],
            "All copies of a variable start equal.",
            ['reduce the value first, or start from a constant and assign in a synchronization="on_read" variable'],
        )
    )


class AbsentProcessError(ReplicaxError, TimeoutError):
    """Another process did not come to a point where all must meet, within the deadline."""


# -- Updates, destinations and colocation


def not_an_accumulation(given: Any) -> TypeError:
    return TypeError(
        f"ReductionToOneDevice(accumulation_fn={given!r}): a function that adds up a list of arrays, or None for `+`."
    )


class ReduceOpError(ReplicaxError, AssertionError, ValueError):
    """A word that says how to aggregate a variable where one that names a reduction is needed."""


class ForeignVariableError(VariableError, AssertionError):
    """What was to be read or updated is no variable, or none of this strategy."""


class UpdateArgumentError(LocalityError, AssertionError, ValueError):
    """A value per replica where all components of a variable need the same one."""


def aggregation_as_reduce_op(aggregation: Any) -> ReduceOpError:
    return ReduceOpError(
        message(
            f"strategy.extended.reduce_to({aggregation}, value, destinations)",
            why="An aggregation says what an assignment to a variable means; a reduction is named by rx.ReduceOp.",
            instead=['"sum" or "mean"', "rx.ReduceOp.from_variable_aggregation(aggregation)"],
        )
    )


def not_a_pair(pair: Any, rule: str) -> InputError:
    return InputError(
        message(
            "strategy.extended.batch_reduce_to(op, value_destination_pairs)", [" ".join(_short(pair).split())], rule,
            ["[(gradient, variable), ...]"],
        )
    )  # fmt: skip


def not_pairs(pairs: Any) -> InputError:
    return not_a_pair(pairs, "`value_destination_pairs` should be a list of tuples.")


def empty_destinations() -> DeviceError:
    return DeviceError(
        "destinations can not be empty: write a variable, a value or a device, or None for all replicas."
    )


def not_a_destination(destinations: Any) -> DeviceError:
    return DeviceError(
        message(
            "destinations must be one of a `DistributedValues` object, a variable, an array, a device or its name",
            [_short(destinations)],
            "It says on which devices the result should lie.",
            ["the variable that the value updates", "'cpu:0' or jax.devices()[0]"],
        )
    )


def destinations_as_a_list(destinations: Any) -> DeviceSpecError:
    return DeviceSpecError(
        message(
            "strategy.extended takes one destination, not a list of them or none",
            [_short(destinations)],
            "What lies on several devices is itself a destination: a variable, or a value per replica.",
            ["pass the variable or the value", "call it once for each device"],
        )
    )


def broadcast_of_per_replica(value: Any) -> UpdateArgumentError:
    return UpdateArgumentError(
        message(
            "broadcast of a value that differs per replica",
            [" ".join(_short(value).split())],
            "One value goes to all devices; which of these is it?",
            ['strategy.reduce("mean", value)', "strategy.experimental_local_results(value)[0]"],
        )
    )


def read_of_no_variable(given: Any) -> ForeignVariableError:
    return ForeignVariableError(
        message(
            "strategy.extended.read_var(v): v is not an rx.Variable",
            [_short(given)],
            instead=["strategy.reduce(op, x) for a value per replica"],
        )
    )


def update_of_no_variable(variable: Any) -> ForeignVariableError:
    return ForeignVariableError(
        message(
            "strategy.extended.update(x, fn, ...): x is not an rx.Variable",
            [_short(variable)],
            instead=["strategy.extended.update_non_slot(devices, fn, ...) for state that belongs to no variable"],
        )
    )


def update_of_foreign_variable(variable: Any, strategy: Any) -> ForeignVariableError:
    return ForeignVariableError(
        message(
            f"strategy.extended.update({variable.name}, fn, ...): the variable belongs to another strategy",
            [f"variable  {variable.strategy!r}", f"called on {strategy!r}"],
            "Its copies lie where the strategy that was in force put them when it was made.",
            ["make it inside `with strategy.scope():`"],
        )
    )


def update_with_per_replica(call: str, path: str, value: Any) -> UpdateArgumentError:
    return UpdateArgumentError(
        message(
            f"{call} got an argument that differs per replica",
            [f"args{path}  {' '.join(_short(value).split())}"],
            "Every copy of the variable takes the same update, or they would drift apart.",
            [
                "reduce it to the variable first: strategy.extended.reduce_to(op, value, variable)",
                'keep one per replica: rx.Variable(..., synchronization="on_read")',
            ],
        )
    )


def not_non_slot_devices(devices: Any) -> DeviceSpecError:
    return DeviceSpecError(
        message(
            "strategy.extended.update_non_slot(devices, fn, ...) takes what non_slot_devices(variables) returned",
            [_short(devices)],
            "That is a tuple of the strategy's devices.",
            ["devices = strategy.extended.non_slot_devices(variables)"],
        )
    )


def colocated_with_foreign(variable: Any, strategy: Any) -> VariableError:
    return VariableError(
        message(
            "`colocate_vars_with` must only be passed a variable created in this tf.distribute.Strategy.scope(), not: "
            f"{variable!r}",
            [f"variable  {variable.strategy!r}", f"called on {strategy!r}"],
            "Where it lies means nothing to this strategy.",
            ["make it inside `with strategy.scope():`"],
        )
    )


def colocated_with_some_devices(devices: Sequence[Any], all_of_them: Sequence[Any]) -> VariableError:
    return VariableError(
        message(
            "colocate_vars_with(devices) with some of the strategy's devices",
            [f"asked for  {list(map(str, devices))}", f"it has     {list(map(str, all_of_them))}"],
            "A variable lies on all of them, so that every replica has a copy, or on one.",
            ["colocate_vars_with(strategy.extended.worker_devices)", "colocate_vars_with(one_device)"],
        )
    )


def colocated_with_nothing(beside: Any) -> VariableError:
    return VariableError(
        message(
            "`colocate_vars_with` must only be passed a variable created in this tf.distribute.Strategy.scope(), not: "
            f"{_short(beside)}",
            why="It is no variable, and no device either.",
            instead=["pass a variable, a device or what non_slot_devices(variables) returned"],
        )
    )


def no_devices_by_default(what: str) -> ContextError:
    return ContextError(
        f"`{what}` of the default strategy: it is unsupported by default, as the default strategy places nothing. Make a "
        'strategy that does, rx.OneDeviceStrategy("cpu:0") say, or ask jax.devices().'
    )


def broadcast_by_default(destinations: Any) -> NotAvailableError:
    return NotAvailableError(
        message(
            "strategy.extended.broadcast_to(tensor, destinations) of the default strategy",
            [f"destinations  {_short(destinations)}"],
            "The default strategy places nothing, so it has no devices to send a value to.",
            ["broadcast_to(tensor, None), which is `tensor`", "jax.device_put(tensor, device)"],
        )
    )


def no_variables_for_non_slot() -> InputError:
    return InputError(
        message(
            "strategy.extended.non_slot_devices(var_list) of no variables",
            ["var_list  []"],
            "This strategy keeps state that belongs to no variable beside the variable whose name comes first.",
            ["strategy.extended.non_slot_devices(variables)"],
        )
    )


def locality_in_replica() -> ContextError:
    return ContextError(
        message(
            "rx.locality(value) inside a replica",
            why="Whether a value equals those of the other replicas is known when the whole step has been looked at.",
            instead=["ask for what `strategy.run` returned", "rx.assert_mirrored(value) states that it is the same"],
        )
    )


def apply_across() -> ContextError:
    return ContextError(
        message(
            "`apply_gradients() cannot be called in cross-replica context`",
            why="It reduces the gradients of each replica, so each replica has to call it.",
            instead=["call it in the function given to strategy.run"],
        )
    )


def unknown_to_optimizer(unknown: Sequence[Any], known: Sequence[Any]) -> VariableError:
    return VariableError(
        message(
            "rx.Optimizer.apply_gradients got variables that it has no slots for",
            [f"{variable!r}" for variable in unknown],
            f"Its slots were made for {len(known)} variables, at the first call or by `build`.",
            ["opt.build(all_variables) before the first step"],
        )
    )


def two_gradients(variables: Sequence[Any]) -> VariableError:
    return VariableError(
        message(
            "rx.Optimizer.apply_gradients got more than one gradient for a variable",
            [f"{variable!r}" for variable in variables],
            "An update is made once, from one gradient. All but one would be lost.",
            ["add them up first", "differentiate the sum of the losses"],
        )
    )


def not_gradients(pairs: Sequence[tuple[Any, Any]]) -> TypeError:
    return TypeError(
        message(
            "rx.Optimizer.apply_gradients got what is no gradient",
            [f"{variable!r}  {type(gradient).__name__}" for variable, gradient in pairs],
            "A gradient is an array of the shape of its variable, `rx.IndexedSlices`, or None.",
            ["`gradients = rx.grad(loss, variables)()`, then `zip(gradients, variables, strict=True)`"],
        )
    )


def gradients_of_integers(variables: Sequence[Any]) -> VariableError:
    return VariableError(
        message(
            "rx.Optimizer.apply_gradients got gradients for variables that hold no real numbers",
            [f"{variable!r}" for variable in variables],
            "An update is a small step; rounded to an integer it is mostly none.",
            ["give the variable a type that has small steps: `dtype=jnp.float32`", "leave it out of the pairs"],
        )
    )


def gradients_of_other_shapes(pairs: Sequence[tuple[Any, tuple[int, ...]]]) -> VariableError:
    return VariableError(
        message(
            "rx.Optimizer.apply_gradients got gradients that do not have the shape of their variable",
            [f"{variable!r}  gradient of shape {list(shape)}" for variable, shape in pairs],
            "A gradient has one entry for each of the variable.",
            ["pair each gradient with its own variable: `zip(gradients, variables, strict=True)`"],
        )
    )


def not_a_number(fn: Any, site: Any, error: Exception) -> FloatingPointError:
    return FloatingPointError(f"`{_name(fn)}` made a value that is not a number at {site}: {error}")


# -- Line by line: replicas on threads


def replicas_do_not_meet(states: Sequence[Any]) -> ContextError:
    """`states` holds, for each replica, the call it waits in, or a word if it has returned."""
    waiting = [state for state in states if not isinstance(state, str)]
    merges = any(call.what == "merge_call" for call in waiting)
    if len({call.what for call in waiting}) > 1:
        headline = "The replicas wait for each other in different calls"
    elif merges:
        headline = "Some replicas made a different number of replica_context().merge_call() calls"
    else:
        headline = f"Some replicas made a different number of {waiting[0].what} calls"
    return ContextError(
        message(
            headline,
            [
                f"replica {i}  "
                + (f"has {state}" if isinstance(state, str) else f"waits in {state.what} at {state.site}")
                for i, state in enumerate(states)
            ],
            "All replicas must make the same calls in the same order, or those that wait would wait for ever.",
            ["make the call on every replica, outside of conditions that differ between replicas"],
        )
    )


def met_while_meeting(call: Any, earlier: Any) -> ContextError:
    return ContextError(
        message(
            f"{call.what} at {call.site} in code that speaks for all replicas",
            [f"the replicas are waiting in {earlier.what} at {earlier.site}"],
            "They come back when this code is done, so they cannot be met from here.",
            ["reduce before the merge_call, or use strategy.reduce(op, value) in it"],
        )
    )


def different_operands(call: Any, kinds: Sequence[str]) -> StructureError:
    return StructureError(
        message(
            f"{call} of values that differ in shape or type between the replicas",
            [f"replica {i}  {kind}" for i, kind in enumerate(kinds)],
            "They are combined element by element.",
            ["reduce the uneven axis first, or concatenate along it with all_gather"],
        )
    )


def merge_of_a_transformed_value(leaf: Any, site: Any) -> ContextError:
    return ContextError(
        message(
            f"`merge_call` called while defining a new graph: inside jax.grad, jax.vmap or jax.checkpoint, at {site}",
            [f"an argument of type {type(leaf).__name__}"],
            "The function runs once for all replicas, and a value that is being transformed belongs to one of them.",
            ["all_reduce and all_gather can be differentiated", "call merge_call outside of the transformed function"],
        )
    )


def created_by_this_replica_only(name: str, replica: int, made: Sequence[str]) -> ContextError:
    return ContextError(
        message(
            f"Tried to create variable {name!r} with mismatching name on replica {replica}",
            [f"replica 0 made  {', '.join(map(repr, made)) or 'no variable'}"],
            "Replica 0 makes the variables of a step; the others are given the same ones, matched by name and order.",
            ["create the same variables on every replica", "create them before the run, in strategy.scope()"],
        )
    )


def unequal_copies(fn: Any, variable: Any, site: Any, copies: Sequence[Any]) -> LocalityError:
    return UnreducedWriteError(
        message(
            f"`{_name(fn)}` left unequal copies of the mirrored variable {variable.name!r}, written at {site}",
            [f"replica {i}  {' '.join(str(copy).split())[:100]}" for i, copy in enumerate(copies)],
            "It has one value for all replicas. None of its writes in this run was kept.",
            [
                'reduce the value first: rx.get_replica_context().all_reduce("mean", value)',
                'let the variable combine: rx.Variable(..., aggregation="mean") or "sum"',
                'keep one per replica: rx.Variable(..., synchronization="on_read")',
            ],
        )
    )


def wrong_number_of_components(argument: str, components: int, replicas: int) -> InputError:
    return ComponentsError(
        message(
            "strategy.run(step, ...) got a per-replica value with another number of components than there are replicas",
            [f"{argument}  {components} components, {replicas} replicas in this process"],
            "Each replica gets its own component.",
            ["make it with the strategy that runs the step"],
        )
    )


# -- Cross-device ops


class NotReducibleError(ReplicaxError, TypeError):
    """A value that cannot be added up, or of which there is no smallest."""


def not_reducible(word: str, leaf: Any) -> NotReducibleError:
    return NotReducibleError(
        message(
            f'"{word}" over replicas of something that has none',
            [_short(leaf) if hasattr(leaf, "dtype") else f"{type(leaf).__name__}: {_short(leaf)}"],
            "Arrays and numbers are combined element by element; random keys, text and objects cannot be, and complex "
            "numbers have no order.",
            ["combine numbers", "strategy.experimental_local_results(value) lists what each replica has"],
        )
    )


def not_a_reduce_op(reduce_op: Any) -> ReduceOpError:
    return ReduceOpError(
        message(
            f"`reduce_op` must be Reduce.SUM or Reduce.MEAN (or MIN or MAX), not {reduce_op!r}",
            why="Cross-device ops take members of rx.ReduceOp; words are for strategies and contexts.",
            instead=["rx.ReduceOp.SUM", "rx.ReduceOp.parse(word)"],
        )
    )


def not_a_value_and_destinations(pair: Any) -> InputError:
    rule = "a tuple." if not isinstance(pair, tuple) else "a tuple of size 2."
    return InputError(
        message(
            "batch_reduce(reduce_op, value_destination_pairs)",
            [" ".join(_short(pair).split())],
            f"Each element of `value_destination_pairs` should be {rule}",
            ["[(per_replica_gradient, variable), ...]"],
        )
    )


def not_per_replica(value: Any) -> InputError:
    return InputError(
        message(
            f"A {type(value).__name__} was given where a cross-device op expects one value per replica",
            [_short(value)],
            "Is it one value, or one for each replica?",
            ["rx.PerReplica(tuple(values)) for one per replica", "jnp.asarray(value) for a single array"],
        )
    )


def not_cross_device_ops(ops: Any) -> TypeError:
    if isinstance(ops, type):
        wrong, instead = f"the class {ops.__name__}, not an object of it", [f"cross_device_ops={ops.__name__}()"]
    else:
        wrong, instead = repr(ops), ["rx.NcclAllReduce(), rx.ReductionToOneDevice() or rx.HierarchicalCopyAllReduce()"]
    return TypeError(
        message(
            f"`cross_device_ops` is {wrong}",
            why="It says how values are combined over replicas.",
            instead=[*instead, "a subclass of rx.CrossDeviceOps with a reduce_implementation of your own"],
        )
    )


def hook_returned_per_replica(ops: Any, result: Any) -> TypeError:
    return TypeError(
        message(
            f"{type(ops).__name__}.reduce_implementation(...) returned one value per replica",
            [" ".join(_short(result).split())],
            "A reduction ends in one value; it is put on every replica by itself.",
            ["return the array"],
        )
    )


def hook_changed_shape(ops: Any, operand: Any, result: Any) -> InputError:
    return InputError(
        message(
            f"{type(ops).__name__}.reduce_implementation(...) returned another shape than it was given",
            [f"each replica's value  {_short(operand)}", f"returned  {_short(result)}"],
            "Replicas are combined element by element.",
            ["reduce over ``jnp.stack(per_replica_value.values)`` along axis 0 only"],
        )
    )


class ScatterError(VariableError, NotImplementedError):
    """A change of some rows of a variable whose kind does not say what that would mean."""


def scatter_of_no_slices(variable: Any, method: str, value: Any) -> TypeError:
    return TypeError(
        message(
            f"`{variable.name}.{method}(x)`: x is not an instance of IndexedSlices",
            [_short(value)],
            "It says which rows change and how.",
            [f"{variable.name}.{method}(rx.IndexedSlices(values, indices))"],
        )
    )


def scatter_on_read(variable: Any, method: str) -> ScatterError:
    return ScatterError(
        message(
            f"`{variable.name}.{method}(...)` of a variable with synchronization ON_READ",
            why="Each replica has a component of its own.",
            instead=[f"{variable.name}.assign({variable.name}.value.at[indices].add(values)) inside a replica"],
        )
    )


def scatter_of_many(variable: Any, method: str) -> ScatterError:
    aggregation = variable.aggregation.name
    return ScatterError(
        message(
            f"{method} is only supported for mirrored variable (`{variable.name}`) with NONE or `ONLY_FIRST_REPLICA` "
            "aggregation",
            [f"aggregation {aggregation}"],
            f"A {aggregation} over the replicas is not defined for it: every replica may give a row for one index.",
            [
                'rx.Variable(..., aggregation="only_first_replica")',
                'reduce first: all_reduce("max", x), and then assign',
            ],
        )
    )


def scatter_shapes(variable: Any, method: str, indices: Any, values: Any, dense_shape: Any) -> VariableError:
    return VariableError(
        message(
            f"`{variable.name}.{method}(IndexedSlices(values, indices))`: the rows do not fit the variable",
            [
                f"variable  {list(variable.shape)}",
                f"indices  {_short(indices)}, which should be a list of integers",
                f"values  {_short(values)}, which should be {[*indices.shape, *variable.shape[1:]]}",
                *([] if dense_shape is None else [f"dense_shape  {list(dense_shape)}"]),
            ],
            "Each index needs one row of the variable's width.",
        )
    )


# -- Replicas of several devices


def eager_over_several_devices(placement: Any) -> NotAvailableError:
    axes = ", ".join(f"{name!r}: {placement.mesh.shape[name]}" for name in placement.auto_axes)
    return NotAvailableError(
        message(
            "A step cannot be run line by line when a replica is made of several devices",
            [f"replica_mesh={{{axes}}}"],
            "Line by line each replica is a thread with one device of its own. How an operation is divided over several "
            "devices is decided by the compiler.",
            [
                "look into the compiled step with `jax.debug.print`",
                "debug on one device: `rx.OneDeviceStrategy(device, eager=True)`",
            ],
        )
    )


def no_replica_mesh(given: Any) -> DeviceError:
    return DeviceError(
        message(
            f"`replica_mesh={given!r}` does not name the axes inside a replica and their sizes",
            why="It is a dictionary: each axis has a name and a positive whole number of devices.",
            instead=['replica_mesh={"model": 2}'],
        )
    )


def uneven_replica_mesh(inside: Any, devices: int) -> DeviceError:
    each = math.prod(inside.values())
    sizes = " x ".join(str(size) for size in inside.values()) + (f" = {each}" if len(inside) > 1 else "")
    fewer = [f"give it {devices // each * each} of them: `devices=jax.devices()[:{devices // each * each}]`"]
    return DeviceError(
        message(
            f"`replica_mesh={inside!r}` does not divide the devices into replicas",
            [f"{devices} devices, {sizes} for each replica"],
            "Every replica needs equally many devices, and the axis 'replica' is the one between replicas.",
            [
                "choose sizes whose product divides the number of devices",
                *(fewer if devices > each and devices % each else []),
                "name the axes otherwise, 'model' say",
            ],
        )
    )
