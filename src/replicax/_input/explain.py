"""Who reads which rows, and why? The answer as data, and as a table."""

from __future__ import annotations

import dataclasses

from replicax._input.ahead import Depths
from replicax._input.plan import Split
from replicax._placement import Placement
from replicax._shown import Grid, Shown


@dataclasses.dataclass(frozen=True)
class Reader:
    """What one replica gets of a batch."""

    replica: int
    process: int
    device: str
    pipeline: str
    """Whose iterator it takes its rows from."""
    full: range | None
    """Its rows of a full global batch; None when it takes whole batches of its pipeline, or the size is not known."""
    short: range | None
    """Its rows of the last, short batch, where its size is known."""


@dataclasses.dataclass(frozen=True, repr=False)
class Explanation(Shown):
    """How a dataset is handed out. Print it, or read its fields."""

    source: str
    length: int | None
    shard: str
    """The policy by which processes divide the data."""
    why: str
    """What decided on the policy."""
    batch_size: int | None
    """The rows of a full global batch, where they are known before one is read."""
    block: int | None
    """The rows of every replica's block, padding included."""
    masked: bool
    """Whether batches carry a mask that says which rows are real."""
    ahead: Depths
    """How many batches a thread reads ahead, and where they wait."""
    readers: tuple[Reader, ...]
    divided: bool = True
    """Whether replicas share out global batches, rather than taking whole ones of a pipeline."""

    def facts(self) -> dict[str, str]:
        return {
            "source": self.source.replace("`", ""),
            "batches": "not known beforehand" if self.length is None else str(self.length),
            "batch size": "that of the first batch" if self.batch_size is None else str(self.batch_size),
            "divided by": f"{self.shard}: {self.why}",
            "padding": self._padding(),
            "read ahead": str(self.ahead),
        }

    def grids(self) -> list[Grid]:
        columns = ("replica", "process", "device", "reads from", "rows of a full batch", "rows of the last batch")
        rows = [
            (
                str(reader.replica),
                str(reader.process),
                reader.device,
                reader.pipeline,
                _rows(reader.full, "an equal part, in order" if self.divided else "its own batch"),
                _rows(reader.short, "-"),
            )
            for reader in self.readers
        ]
        return [Grid(columns, rows)]

    def _padding(self) -> str:
        if len(self.readers) == 1:
            return "none: one replica takes every batch as it is"
        if not self.masked:
            return "none: every batch divides evenly"
        size = "the largest share" if self.block is None else f"{self.block} rows"
        return f"each replica's block is filled up to {size}; a mask tells which rows are real"


def readers(placement: Placement, pipelines: list[str], full: Split | None, short: Split | None) -> tuple[Reader, ...]:
    """One reader for each replica of the job."""
    return tuple(
        Reader(
            replica,
            device.process_index,
            f"{device.platform}:{device.id}",
            pipelines[replica],
            None if full is None else full.rows_of(replica),
            None if short is None else short.rows_of(replica),
        )
        for replica, device in enumerate(placement.devices)
    )


def _rows(rows: range | None, unknown: str) -> str:
    if rows is None:
        return unknown
    if len(rows) < 2:
        return f"1 row: {rows.start}" if rows else "none, only padding"
    return f"{len(rows)} rows: {rows.start} to {rows.stop - 1}"
