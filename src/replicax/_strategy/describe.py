"""What does this strategy use, and which device holds what? The answers as data, as tables, and as a picture."""

from __future__ import annotations

import dataclasses
import html
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec

from replicax._shown import Grid, Shown
from replicax._values import PARTS, STACKED, TRACED, DistributedValues, PerReplica
from replicax._variables.variable import Variable

if TYPE_CHECKING:
    from replicax._strategy.base import Strategy

PyTree = Any


@dataclasses.dataclass(frozen=True)
class ReplicaPlace:
    """Where one replica computes."""

    replica: int
    process: int
    here: bool
    """Whether it is a process slot of this process."""
    devices: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class VariablePlace:
    """How one variable lies between steps."""

    name: str
    type: str
    kind: str
    layout: str
    bytes_per_device: int
    """On the device of this process that holds most of it."""


@dataclasses.dataclass(frozen=True, repr=False)
class Description(Shown):
    """What `strategy.describe()` returns. Print it, or read its fields."""

    strategy: str
    mesh: dict[str, int]
    rest: str
    """Where variables lie between steps unless they say otherwise."""
    cross_device_ops: str
    steps: str
    """How steps are carried out."""
    replicas: tuple[ReplicaPlace, ...]
    variables: tuple[VariablePlace, ...]

    def facts(self) -> dict[str, str]:
        return {
            "strategy": self.strategy,
            "mesh": ", ".join(f"{name} {size}" for name, size in self.mesh.items()),
            "variables rest": self.rest,
            "cross-device ops": self.cross_device_ops,
            "steps": self.steps,
        }

    def grids(self) -> list[Grid]:
        replicas = Grid(
            ("replica", "process", "this process", "devices"),
            [
                (str(place.replica), str(place.process), "yes" if place.here else "no", ", ".join(place.devices))
                for place in self.replicas
            ],
        )
        variables = Grid(
            ("variable", "type", "kind", "layout", "bytes per device"),
            [(v.name, v.type, v.kind, v.layout, f"{v.bytes_per_device:,}") for v in self.variables],
        )
        return [replicas, variables] if self.variables else [replicas]


def describe(strategy: Strategy) -> Description:
    """Replicas, devices and variables of `strategy`."""
    placement = strategy.placement
    grid = placement.mesh.devices.reshape(placement.replicas, -1)
    return Description(
        strategy=type(strategy).__name__,
        mesh=dict(placement.mesh.shape),
        rest=_rest(strategy),
        cross_device_ops=type(strategy.cross_device_ops).__name__,
        steps="line by line" if strategy.eager else "compiled",
        replicas=tuple(
            ReplicaPlace(i, row[0].process_index, i in placement.local_replicas, tuple(map(_name, row)))
            for i, row in enumerate(grid)
        ),
        variables=tuple(_variable(variable) for variable in sorted(strategy.made, key=lambda v: v.serial)),
    )


def _rest(strategy: Strategy) -> str:
    placement = strategy.placement
    if placement.apart:
        assert placement.parameter_device is not None
        return f"once, on {_name(placement.parameter_device)}"
    if strategy.layouts is not None:
        return f"as {strategy.layouts} says"
    return "on the device" if placement.mesh.size == 1 else "a copy on each device"


def _variable(variable: Variable) -> VariablePlace:
    array = variable._array
    held: dict[Any, int] = {}
    for shard in array.addressable_shards:
        held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    aggregation = variable.aggregation.name.lower()
    kind = "on read" if variable.on_read else "mirrored"
    return VariablePlace(
        name=variable.name,
        type=f"{variable.dtype}{list(variable.shape)}",
        kind=kind if aggregation == "none" else f"{kind}, {aggregation}",
        layout=_layout(variable),
        bytes_per_device=max(held.values()),
    )


def _layout(variable: Variable) -> str:
    if variable.on_read:
        return "one component per replica"
    if len(variable.devices) == 1:
        return _name(variable.devices[0])
    return "copies" if variable.layout in (None, PartitionSpec()) else f"cut: {variable.layout}"


# -- which device holds what


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of an array, and who holds it."""

    index: tuple[tuple[int, int], ...]
    """For each axis from where to where."""
    devices: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of what was asked about."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    """Empty for what is no array."""
    pieces: tuple[Piece, ...]
    """Empty for what lies on no device."""

    @property
    def title(self) -> str:
        words = f"{self.name}  {self.kind}".strip()
        return f"{words}, {self.dtype}{list(self.shape)}" if self.dtype else words


@dataclasses.dataclass(frozen=True, repr=False)
class Picture(Shown):
    """What `rx.visualize` returns. Print it, read its fields, or write it to a file with `svg`."""

    leaves: tuple[Leaf, ...]

    def grids(self) -> list[Grid]:
        return [Grid(("value", "part", "devices"), [row for leaf in self.leaves for row in _rows(leaf)])]

    def svg(self) -> str:
        """The same as a drawing: for each array a rectangle, cut as the array is, with the names of the holders."""
        drawings, top = [], _GAP
        for leaf in self.leaves:
            drawings.append(_drawing(leaf, top))
            top += _LINE + _HEIGHT + _GAP
        size = f'width="{_WIDTH + 2 * _GAP}" height="{top}"'
        return f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="monospace">\n{"".join(drawings)}</svg>\n'


_WIDTH, _HEIGHT, _LINE, _GAP = 640, 120, 22, 16
_COLOURS = ("#a6cee3", "#b2df8a", "#fdbf6f", "#cab2d6", "#fb9a99", "#ffff99", "#d9d9d9", "#8dd3c7")


def visualize(x: PyTree, *, path: str | Path | None = None) -> Picture:
    """Shows which device holds which part of a value: an array, a `PerReplica`, a variable, or a structure of them.

    Args:
      path: A file to draw it into, as SVG.

    >>> import jax, jax.numpy as jnp, replicax as rx
    >>> from jax.sharding import PartitionSpec as P
    >>> strategy = rx.MirroredStrategy(jax.devices()[:2])
    >>> with strategy.scope():
    ...     w = rx.Variable(jnp.zeros((6, 4)), name="w", layout=P("replica"))
    >>> for piece in rx.visualize(w).leaves[0].pieces:
    ...     print(piece)
    Piece(index=((0, 3), (0, 4)), devices=('cpu:0',))
    Piece(index=((3, 6), (0, 4)), devices=('cpu:1',))
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(x, is_leaf=lambda leaf: isinstance(leaf, DistributedValues))
    picture = Picture(tuple(_leaf(jax.tree_util.keystr(path), leaf) for path, leaf in flat))
    if path is not None:
        Path(path).write_text(picture.svg())
    return picture


def _leaf(name: str, value: Any) -> Leaf:
    if isinstance(value, Variable):
        kind = "on-read variable" if value.on_read else "variable"
        return _array(f"{name} {value.name}".strip(), kind, value._array)
    if isinstance(value, PerReplica) and value.form not in (PARTS, TRACED):
        return _array(name, "per replica, stacked" if value.form == STACKED else "per replica, rows", value.data)
    if isinstance(value, jax.Array) and not isinstance(value, Tracer):
        mirrored = value.is_fully_replicated and len(value.devices()) > 1
        return _array(name, "mirrored" if mirrored else "array", value)
    if isinstance(value, np.ndarray):
        return Leaf(name, "NumPy array", value.shape, str(value.dtype), ())
    return Leaf(name, "per replica, parts" if isinstance(value, PerReplica) else type(value).__name__, (), "", ())


def _array(name: str, kind: str, array: jax.Array) -> Leaf:
    holders: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        spans = tuple(part.indices(size)[:2] for part, size in zip(index, array.shape, strict=True))
        holders.setdefault(spans, []).append(device)
    pieces = (Piece(span, tuple(map(_name, _by_id(devices)))) for span, devices in sorted(holders.items()))
    return Leaf(name, kind, array.shape, str(array.dtype), tuple(pieces))


def _by_id(devices: list[jax.Device]) -> list[jax.Device]:
    return sorted(devices, key=lambda device: device.id)


def _name(device: jax.Device) -> str:
    return f"{device.platform}:{device.id}"


def _rows(leaf: Leaf) -> list[tuple[str, str, str]]:
    if not leaf.pieces:
        return [(leaf.title, "all", "none: an object of this process")]
    return [
        (leaf.title if i == 0 else "", _span(piece, leaf), ", ".join(piece.devices))
        for i, piece in enumerate(leaf.pieces)
    ]


def _span(piece: Piece, leaf: Leaf) -> str:
    if len(leaf.pieces) == 1:
        return "all"
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in piece.index) + "]"


def _drawing(leaf: Leaf, top: int) -> str:
    """The first two axes as height and width; pieces that differ in further axes only share a rectangle."""
    rows, columns = (*leaf.shape[:2], 1, 1)[:2] if len(leaf.shape) != 1 else (leaf.shape[0], 1)
    merged: dict[Any, list[str]] = {}
    for piece in leaf.pieces or (Piece((), ("this process",)),):
        vertical, horizontal = (*piece.index[:2], (0, 1), (0, 1))[:2] if piece.index else ((0, rows), (0, columns))
        merged.setdefault((vertical, horizontal), []).extend(piece.devices)
    lines = [f'<text x="{_GAP}" y="{top + 14}" font-size="14">{html.escape(leaf.title)}</text>\n']
    for number, (((top_row, end_row), (left, right)), devices) in enumerate(merged.items()):
        x, y = _GAP + _WIDTH * left / max(columns, 1), top + _LINE + _HEIGHT * top_row / max(rows, 1)
        width, height = _WIDTH * (right - left) / max(columns, 1), _HEIGHT * (end_row - top_row) / max(rows, 1)
        colour = _COLOURS[number % len(_COLOURS)]
        label = html.escape(", ".join(devices))
        size = max(6, min(14, math.floor(height) - 2, math.floor(1.6 * width / max(len(label), 1))))
        lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{colour}" stroke="black"/>\n'
            f'<text x="{x + width / 2:g}" y="{y + height / 2 + size / 3:g}" font-size="{size}" '
            f'text-anchor="middle">{label}</text>\n'
        )
    return "".join(lines)
