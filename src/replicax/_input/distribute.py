"""How does a dataset become a distributed one? The functions behind the methods of a strategy."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import jax

from replicax import _context
from replicax._errors import InputError, NotADatasetError, message
from replicax._input.agreement import Agreement, Alone, Together
from replicax._input.dataset import (
    DistributedDataset,
    DistributedIterator,
    distributed_twice,
    is_distributed,
    refuse_in_replica,
)
from replicax._input.explain import Explanation, readers
from replicax._input.feed import Feed
from replicax._input.options import (
    InputContext,
    InputOptions,
    InputReplicationMode,
    Shard,
    check_for_dataset,
    check_for_function,
    options_of,
    shard_word,
)
from replicax._input.plan import balanced
from replicax._input.rows import ArrayRows, rows_of
from replicax._input.sources import Pass, Source, as_source, from_calls, takes
from replicax._input.steps import GlobalSteps, Padding, ReplicaSteps, Steps
from replicax._placement import Placement

if TYPE_CHECKING:
    from replicax._strategy.base import Strategy

PyTree = Any


def distribute_dataset(strategy: Strategy, dataset: Any, options: InputOptions | None = None) -> DistributedDataset:
    """Hands out global batches: each is divided over all replicas of the job."""
    call = "strategy.distribute_dataset(dataset)"
    _check_place(strategy, call)
    options = options_of(options)
    check_for_dataset(options)
    if is_distributed(dataset):
        raise distributed_twice(call)
    source = as_source(dataset, call)
    placement = strategy.placement
    shard, why = _policy(source, options, placement)
    if shard == "off" and len(_processes(placement)) > 1:
        return _each_process_by_itself(placement, source, options, why)
    if shard == "files" and len(_processes(placement)) > 1:
        return _each_process_its_files(placement, source, options, why)
    promised = _needs_none(source, placement)
    short_ahead = not promised and source.last_rows is not None
    padding = Padding(source.batch_size, promised, short_ahead, options.short_batches == "refuse")
    feed = Feed(placement, options.fetch_to_device)
    processes = _processes(placement)
    return DistributedDataset(
        lambda: GlobalSteps(
            Pass(source), feed, padding, Together(processes, source.name) if len(processes) > 1 else None
        ),
        lambda: _explain_global(source, placement, padding, options, shard, why),
        options.depths,
        source.length,
    )


def distribute_from_function(
    strategy: Strategy,
    fn: Callable[[InputContext], Any],
    options: InputOptions | None = None,
    call: str = "strategy.distribute_datasets_from_function(fn)",
) -> DistributedDataset:
    """Hands out batches of one replica's size, read from what `fn` returns for each input pipeline."""
    _check_place(strategy, call)
    _check_function(fn, call)
    options = options_of(options)
    check_for_function(options)
    placement = strategy.placement
    to_device = options.fetch_to_device or options.experimental_place_dataset_on_device
    feed = Feed(placement, to_device)
    contexts = _contexts(placement, feed, options.experimental_replication_mode)
    pipelines = [_pipeline(fn, context, call) for context in contexts]
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        names = [f"pipeline {replica}" for replica in range(placement.replicas)]
    else:
        names = [f"pipeline {_process_index(placement, device)}" for device in placement.devices]
    why = "the function divides the data itself; each replica takes batches of its pipeline"
    return _by_replica(placement, feed, pipelines, options, names, "function", why)


def make_dataset_iterator(strategy: Strategy, dataset: Any) -> DistributedIterator:
    """A pass over global batches that is begun already."""
    return iter(distribute_dataset(strategy, dataset))


def make_input_fn_iterator(
    strategy: Strategy,
    input_fn: Callable[[InputContext], Any],
    replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
) -> DistributedIterator:
    """A pass over what `input_fn` returns: one replica's batches, or a function that returns the next one."""
    if replication_mode is not InputReplicationMode.PER_WORKER:
        raise InputError(
            message(
                f"`strategy.make_input_fn_iterator(input_fn, {replication_mode})`: "
                "Input replication mode not supported",
                why="This call asks the function once for each process.",
                instead=["call it for each replica: `strategy.distribute_datasets_from_function(input_fn, options)`"],
            )
        )

    _check_function(input_fn, "strategy.make_input_fn_iterator(input_fn)")

    def fed(context: InputContext) -> Source:
        made = input_fn(context)
        if callable(made) and not hasattr(made, "__iter__"):
            return from_calls(made)
        try:
            return as_source(made)
        except NotADatasetError as error:
            raise _input_fn_returned(made) from error

    return iter(distribute_from_function(strategy, fed, call="strategy.make_input_fn_iterator(input_fn)"))


def make_numpy(strategy: Strategy, tree: PyTree) -> ArrayRows:
    """The rows of arrays as a dataset, to be batched and then distributed."""
    _check_place(strategy, "strategy.experimental_make_numpy_dataset(tree)")
    return rows_of(tree)


def explain(strategy: Strategy, dataset: Any) -> Explanation:
    """Who reads which rows of `dataset`, which may be distributed already or not."""
    if isinstance(dataset, DistributedDataset):
        return dataset.explain()
    return distribute_dataset(strategy, dataset).explain()


def _check_place(strategy: Strategy, call: str) -> None:
    refuse_in_replica(call, "for batch in dataset: strategy.run(step, args=(batch,))")
    _context.require_cross(strategy, call)


# -- which process reads what


def _processes(placement: Placement) -> tuple[int, ...]:
    """The processes that hold replicas."""
    return tuple(sorted({device.process_index for device in placement.devices}))


def _process_index(placement: Placement, device: jax.Device) -> int:
    """Which of the processes that hold replicas `device` belongs to."""
    return _processes(placement).index(device.process_index)


def _policy(source: Source, options: InputOptions, placement: Placement) -> tuple[Shard, str]:
    """How processes divide the data, and what decided that."""
    shard: Shard = shard_word(options.shard)
    why = "asked for in the options"
    if shard == "auto":
        shard = "rows" if source.shard is None else shard_word(source.shard)
        why = "nothing else was asked for" if source.shard is None else "the dataset asks for it"
    processes = len(_processes(placement))
    if processes == 1:
        return shard, f"{why}; one process reads everything"
    if shard == "files" and source.part_of_files is None:
        raise _no_files(source, processes)
    if shard == "files" and source.files < processes:
        return "rows", f"{source.files} file(s) are too few for {processes} processes to divide; each keeps its rows"
    if shard == "files":
        return shard, f"{why}; each of {processes} processes reads every {processes}-th file"
    if shard == "off":
        return shard, f"{why}; each of {processes} processes goes through all of the data by itself"
    return shard, f"{why}; {processes} processes go through the same batches, each keeps the rows of its replicas"


def _needs_none(source: Source, placement: Placement) -> bool:
    """Whether every batch is promised to divide evenly."""
    return source.even and source.batch_size is not None and source.batch_size % placement.replicas == 0


def _each_process_by_itself(
    placement: Placement, source: Source, options: InputOptions, why: str
) -> DistributedDataset:
    """Every process goes through all global batches, one replica's share after the other."""
    parts = Source(f"{source.name}, divided by {placement.replicas}", _shares(source, placement.replicas))
    feed = Feed(placement, options.fetch_to_device)
    names = [f"process {device.process_index}, by itself" for device in placement.devices]
    return _by_replica(placement, feed, [parts], options, names, "off", why)


def _each_process_its_files(
    placement: Placement, source: Source, options: InputOptions, why: str
) -> DistributedDataset:
    """Every process reads its files, and gives each of its replicas a replica's share of a global batch."""
    assert source.part_of_files is not None and source.batch_size is not None
    feed = Feed(placement, options.fetch_to_device)
    sizes = balanced(source.batch_size, placement.replicas).sizes
    mine = _process_index(placement, placement.local_devices[0])
    part = source.part_of_files(mine, len(_processes(placement)), [sizes[replica] for replica in feed.readers])
    names = [f"process {device.process_index}, its files" for device in placement.devices]
    return _by_replica(placement, feed, [part], options, names, "files", why)


def _shares(source: Source, replicas: int) -> Callable[[int], Iterator[Any]]:
    def shares() -> Iterator[Any]:
        for batch in iter(Pass(source).read, None):
            split = balanced(batch.rows or 0, replicas)
            yield from (batch.part(split.rows_of(r)) for r in range(replicas) if split.sizes[r])

    return lambda skip: itertools.islice(shares(), skip, None)


# -- pipelines of one replica's batches


def _contexts(placement: Placement, feed: Feed, mode: InputReplicationMode) -> list[InputContext]:
    """What the pipelines of this process are told about themselves."""
    if mode is InputReplicationMode.PER_REPLICA:
        return [InputContext(placement.replicas, replica, placement.replicas) for replica in feed.readers]
    me = _process_index(placement, placement.local_devices[0])
    return [InputContext(len(_processes(placement)), me, placement.replicas)]


def _pipeline(fn: Callable[[InputContext], Any], context: InputContext, call: str) -> Source:
    """What `fn` returns for one pipeline. Asked once, and again for a new pass if it returned a generator."""
    made = fn(context)
    source = as_source(made, call)
    if not isinstance(made, Iterator):
        return source
    unread = [source]

    def open_again(skip: int) -> Iterator[Any]:
        return (unread.pop() if unread else as_source(fn(context))).open(skip)

    return Source(source.name, open_again)


def _by_replica(
    placement: Placement,
    feed: Feed,
    pipelines: list[Source],
    options: InputOptions,
    names: list[str],
    shard: str,
    why: str,
) -> DistributedDataset:
    processes = _processes(placement)
    alone = len(processes) == 1
    promised = alone and _complete(pipelines, len(feed.readers))
    sizes = [source.batch_size for source in pipelines]
    full = None if None in sizes else max(size for size in sizes if size is not None)
    padding = Padding(full, promised, refuse=options.short_batches == "refuse")

    def open_steps() -> Steps:
        agreement: Agreement = Alone() if alone else Together(processes, pipelines[0].name)
        return ReplicaSteps([Pass(source) for source in pipelines], feed, padding, agreement)

    def explained() -> Explanation:
        return Explanation(
            source=pipelines[0].name,
            length=_length(pipelines, len(feed.readers)) if alone else None,
            shard=shard,
            why=why,
            batch_size=None if full is None or not alone else full * placement.replicas,
            block=padding.full,
            masked=not promised and placement.replicas > 1,
            ahead=options.depths,
            readers=readers(placement, names, None, None),
            divided=False,
        )

    length = _length(pipelines, len(feed.readers)) if alone else None
    return DistributedDataset(open_steps, explained, options.depths, length)


def _complete(pipelines: list[Source], replicas: int) -> bool:
    """Whether every step is promised to find a full batch for each of `replicas` replicas."""
    if not all(source.even for source in pipelines) or len({source.batch_size for source in pipelines}) > 1:
        return False
    if all(source.endless for source in pipelines):
        return True
    lengths = {source.length for source in pipelines}
    each = replicas // len(pipelines)
    return len(lengths) == 1 and None not in lengths and (lengths.pop() or 0) % each == 0


def _length(pipelines: list[Source], replicas: int) -> int | None:
    """The steps until all pipelines have ended."""
    each = replicas // len(pipelines)
    lengths = [source.length for source in pipelines]
    return None if None in lengths else max(-(-length // each) for length in lengths if length is not None)


def _explain_global(
    source: Source, placement: Placement, padding: Padding, options: InputOptions, shard: str, why: str
) -> Explanation:
    replicas, full = placement.replicas, padding.full
    last = source.last_rows
    return Explanation(
        source=source.name,
        length=source.length,
        shard=shard,
        why=why,
        batch_size=full,
        block=None if full is None else -(-full // replicas),
        masked=not padding.promised and replicas > 1,
        ahead=options.depths,
        readers=readers(
            placement,
            [f"process {device.process_index}" for device in placement.devices],
            None if full is None else balanced(full, replicas),
            None if full is None or last in (None, full) else balanced(last, replicas, full),
        ),
    )


# -- errors


def _check_function(fn: Any, call: str) -> None:
    if takes(fn, 1):
        return
    said = f"function `{getattr(fn, '__qualname__', fn)}{inspect.signature(fn)}`" if callable(fn) else f"{fn!r:.60}"
    raise NotADatasetError(
        message(
            f"`{call}` got {said}, which cannot be called with an `InputContext`",
            why="The function is called once for each input pipeline, is told which one it is, and returns batches for "
            "one replica.",
            instead=[
                "let it take one argument: `def make(context): ...`",
                "hand out global batches: `strategy.distribute_dataset(dataset)`",
            ],
        )
    )


def _no_files(source: Source, processes: int) -> InputError:
    return InputError(
        message(
            f'`rx.InputOptions(shard="files")`: {source.name} has no files to divide among {processes} processes',
            why="Which files a dataset reads can only be told to one that was made from a list of them.",
            instead=[
                'let every process keep its rows of the same batches: `shard="rows"`',
                "choose the files yourself: `strategy.distribute_datasets_from_function(make)` with "
                "`files[context.input_pipeline_id :: context.num_input_pipelines]`",
            ],
        )
    )


def _input_fn_returned(made: Any) -> InputError:
    return InputError(
        message(
            "`strategy.make_input_fn_iterator(input_fn)`: input_fn must return a dataset or a callable",
            [f"it returned {type(made).__name__} {made!r:.60}"],
            "Each replica takes its next batch from the dataset, or calls the callable for it.",
            ["return any iterable of batches", "return a function without arguments that returns one batch"],
        )
    )
