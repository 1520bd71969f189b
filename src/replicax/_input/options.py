"""What may the caller ask of the input, and what does an input function know about itself?"""

from __future__ import annotations

import dataclasses
import enum
import operator
from typing import Literal

from replicax._errors import InputError, NotAvailableError, message
from replicax._input.ahead import Depths

Shard = Literal["auto", "rows", "files", "off"]


class InputReplicationMode(enum.Enum):
    """How often an input function is called: once for each process, or once for each replica."""

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


class AutoShardPolicy(enum.IntEnum):
    """How tf.data divides a dataset among workers. Accepted wherever ``shard`` is, which says it in one word.

    >>> import replicax as rx
    >>> rx.InputOptions(shard=rx.data.AutoShardPolicy.DATA).shard
    'rows'
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


_WORDS: dict[str, Shard] = {
    "auto": "auto",
    "rows": "rows",
    "files": "files",
    "off": "off",
    "data": "rows",
    "file": "files",
}


@dataclasses.dataclass(frozen=True)
class InputContext:
    """What an input function may know: which part of the data it is asked for.

    `strategy.distribute_datasets_from_function(make)` calls ``make(context)`` once for each input pipeline, and wants
    batches for *one replica* back. Let the function read its share of the files and cut batches of its share of the
    global batch:

    >>> import replicax as rx
    >>> context = rx.InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4)
    >>> files = ["a", "b", "c", "d", "e"]
    >>> files[context.input_pipeline_id :: context.num_input_pipelines]
    ['b', 'd']
    >>> context.get_per_replica_batch_size(64)
    16
    """

    num_input_pipelines: int = 1
    """How many pipelines feed the job."""
    input_pipeline_id: int = 0
    """Which of them this is, from 0."""
    num_replicas_in_sync: int = 1
    """The replicas of the whole job."""

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """The rows of a global batch that one replica gets; `ValueError` unless all get as many."""
        if isinstance(global_batch_size, bool) or not hasattr(global_batch_size, "__index__") or global_batch_size < 0:
            raise InputError(
                f"The `global_batch_size` {global_batch_size!r} does not count rows. It is a whole number, 0 or more."
            )
        if global_batch_size % self.num_replicas_in_sync:
            raise InputError(
                f"The `global_batch_size` {global_batch_size} is not divisible by `num_replicas_in_sync` "
                f"{self.num_replicas_in_sync}. Use {self._near(global_batch_size)}, or hand out global batches with "
                "`strategy.distribute_dataset(dataset)`, which divides any number of rows."
            )
        return global_batch_size // self.num_replicas_in_sync

    def _near(self, size: int) -> str:
        low = size - size % self.num_replicas_in_sync
        return " or ".join(str(good) for good in (low, low + self.num_replicas_in_sync) if good)

    def __str__(self) -> str:
        return f"rx.InputContext(input pipeline id {self.input_pipeline_id}, total: {self.num_input_pipelines})"


@dataclasses.dataclass(frozen=True)
class InputOptions:
    """How a dataset should be handed out.

    The defaults are right for almost every program. Ask for `prefetch` when reading a batch *waits*, for a disk or a
    network: a thread then reads the next batches while the step runs. When reading a batch computes instead, the
    thread takes the processor away from the step, and nothing is gained.

    Args:
      experimental_fetch_to_device: False leaves the batches in host memory, as one component for each replica, for code
        that looks at them; None means True.
      experimental_replication_mode: Whether an input function is called once for each process or for each replica.
      experimental_place_dataset_on_device: Accepted, with PER_REPLICA and without fetching to the device, for datasets
        whose batches lie on the replica's device already.
      experimental_per_replica_buffer_size: More than 1 asks for that many batches on the devices, one of them in use: 3
        is ``prefetch=2``.
      experimental_prefetch_to_device: The former name of `experimental_fetch_to_device`.
      shard: How processes divide a dataset between them. "rows": all go through the same global batches and each keeps
        the rows of its replicas. "files": each reads its own files, see `rx.data.from_files`. "off": each goes
        through all of the dataset by itself. "auto": what the dataset asks for, else "rows". In a single
        process they are all the same.
      prefetch: How many batches a thread reads ahead and sends to the devices; 0 for no thread.
      short_batches: "pad" fills a short batch up and remembers which rows are real, so a step must take its means with
        `rx.mean` and the like. "refuse" promises that there is none, and a batch that does not divide evenly
        is an error.
      prefetch_to_device: The long name of `prefetch`.
      prefetch_to_host: How many batches a thread reads ahead and keeps in host memory, for devices whose own is
        short. May be combined with `prefetch`.

    >>> import replicax as rx
    >>> rx.InputOptions(prefetch=2).fetch_to_device
    True
    """

    experimental_fetch_to_device: bool | None = None
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1
    experimental_prefetch_to_device: bool | None = None
    shard: Shard | AutoShardPolicy = "auto"
    prefetch: int = 0
    short_batches: Literal["pad", "refuse"] = "pad"
    prefetch_to_device: int = 0
    prefetch_to_host: int = 0

    def __post_init__(self) -> None:
        names = (self.experimental_fetch_to_device, self.experimental_prefetch_to_device)
        if None not in names and bool(names[0]) != bool(names[1]):
            raise _conflict(
                f"experimental_fetch_to_device={names[0]}, experimental_prefetch_to_device={names[1]}",
                "These are two names of one option.",
                f"give one: `rx.InputOptions(experimental_fetch_to_device={names[0]})`",
            )
        if not isinstance(self.experimental_replication_mode, InputReplicationMode):
            raise _conflict(
                f"experimental_replication_mode={self.experimental_replication_mode!r}",
                "An input function is called for each worker or for each replica.",
                *(f"`rx.InputReplicationMode.{mode.name}`" for mode in InputReplicationMode),
            )
        _at_least(self.experimental_per_replica_buffer_size, 1, "experimental_per_replica_buffer_size")
        for name in ("prefetch", "prefetch_to_device", "prefetch_to_host"):
            _at_least(getattr(self, name), 0, name)
        if self.prefetch and self.prefetch_to_device not in (0, self.prefetch):
            raise _conflict(
                f"prefetch={self.prefetch}, prefetch_to_device={self.prefetch_to_device}",
                "These are two names of one option.",
                f"give one: `rx.InputOptions(prefetch={self.prefetch})`",
            )
        if self.short_batches not in ("pad", "refuse"):
            raise _conflict(
                f"short_batches={self.short_batches!r}",
                "A batch with fewer rows than the others is filled up, or refused.",
                '`short_batches="pad"`',
                '`short_batches="refuse"`',
            )
        object.__setattr__(self, "shard", shard_word(self.shard))

    @property
    def fetch_to_device(self) -> bool:
        """Whether batches are copied to the replicas' devices ahead of the step."""
        asked = self.experimental_fetch_to_device, self.experimental_prefetch_to_device
        return all(wish is None or bool(wish) for wish in asked)

    @property
    def depths(self) -> Depths:
        """How many batches wait for their step, and where."""
        buffered = self.experimental_per_replica_buffer_size - 1
        return Depths(self.prefetch_to_host, max(self.prefetch, self.prefetch_to_device, buffered))


def shard_word(shard: Shard | AutoShardPolicy | str) -> Shard:
    """The word for `shard`, which may also be a policy of tf.data or its name."""
    word = shard.name if isinstance(shard, enum.Enum) else shard  # tf.data's own enum has the same names
    if isinstance(word, str) and word.lower() in _WORDS:
        return _WORDS[word.lower()]
    if isinstance(word, str) and word.upper() == "HINT":
        raise NotAvailableError(
            message(
                "The sharding policy HINT marks a place inside a tf.data pipeline, which only TensorFlow can rewrite",
                instead=[
                    "shard there yourself: `strategy.distribute_datasets_from_function(make)` with "
                    "`dataset.shard(context.num_input_pipelines, context.input_pipeline_id)`"
                ],
            )
        )
    raise _conflict(
        f"shard={shard!r}", "That is no way to divide a dataset.", *(f'`shard="{word}"`' for word in list(_WORDS)[:4])
    )


def options_of(options: InputOptions | None) -> InputOptions:
    """`options`, or those that hold when there are none."""
    if options is None or isinstance(options, InputOptions):
        return options or InputOptions()
    raise InputError(
        message(
            f"The options of a dataset are {type(options).__name__} {options!r:.60}",
            why="They are an `rx.InputOptions`, which says what there is to choose.",
            instead=["`rx.InputOptions(prefetch=2)`"],
        )
    )


def check_for_function(options: InputOptions) -> None:
    """Refuses what an input function cannot be combined with."""
    if not options.experimental_place_dataset_on_device:
        return
    if options.experimental_replication_mode is not InputReplicationMode.PER_REPLICA:
        raise _conflict(
            f"experimental_place_dataset_on_device=True, experimental_replication_mode="
            f"{options.experimental_replication_mode.name}",
            "A dataset on a device feeds that one replica, so each replica needs one of its own.",
            "add `experimental_replication_mode=rx.InputReplicationMode.PER_REPLICA`",
            "leave out `experimental_place_dataset_on_device`",
        )
    if options.fetch_to_device:
        raise _conflict(
            "experimental_place_dataset_on_device=True, experimental_fetch_to_device=True",
            "What lies on the device already cannot be fetched there.",
            "add `experimental_fetch_to_device=False`",
            "leave out `experimental_place_dataset_on_device`",
        )


def check_for_dataset(options: InputOptions) -> None:
    """Refuses what a dataset of global batches cannot be combined with."""
    if options.experimental_replication_mode is InputReplicationMode.PER_REPLICA:
        raise NotAvailableError(
            message(
                "`strategy.distribute_dataset(dataset, options)` with `experimental_replication_mode=PER_REPLICA` has "
                "one dataset and would need one for each replica",
                instead=[
                    "give a function that makes them: `strategy.distribute_datasets_from_function(make, options)`",
                    "leave out `experimental_replication_mode`: each global batch is divided among the replicas",
                ],
            )
        )


def _at_least(value: int, least: int, name: str) -> None:
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < least:
        raise _conflict(
            f"{name}={value!r}", f"It counts batches: a whole number, {least} or more.", f"`{name}={least}`"
        )


def _conflict(arguments: str, why: str, *instead: str) -> InputError:
    return InputError(message(f"`rx.InputOptions({arguments})` cannot be", why=why, instead=instead))
