"""What may the caller ask for? The enums and frozen options of the public API, and how words become them."""

from __future__ import annotations

import dataclasses
import enum
import numbers
import operator
from typing import Any


class ReduceOp(enum.Enum):
    """How one value per replica becomes one value.

    Wherever an op is accepted its name is too, in any case: ``strategy.reduce("mean", loss)``.

    >>> ReduceOp.parse("Mean")
    <ReduceOp.MEAN: 'MEAN'>
    """

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"

    @classmethod
    def parse(cls, op: ReduceOp | str) -> ReduceOp:
        """The op that `op` names; `ValueError` for any other word."""
        if isinstance(op, cls):
            return op
        if isinstance(op, str) and op.upper() in cls.__members__:
            return cls[op.upper()]
        given = repr(op)
        if len(given) > 80:  # a value, where the op comes first
            given = f"The first argument, of type {type(op).__name__},"
        raise ValueError(
            f"{given} is not a valid ReduceOp. Write one of "
            + ", ".join(f'"{name.lower()}"' for name in cls.__members__)
            + " or the member of rx.ReduceOp."
        )

    @classmethod
    def from_variable_aggregation(cls, aggregation: VariableAggregation) -> ReduceOp:
        """The op that combines the values assigned to a variable of this aggregation."""
        if aggregation in (VariableAggregation.SUM, VariableAggregation.MEAN):
            return cls[aggregation.name]
        raise ValueError(
            f"Could not convert from `rx.VariableAggregation` {aggregation} to a ReduceOp: only SUM and MEAN name "
            "a reduction."
        )


class VariableSynchronization(enum.Enum):
    """When the copies of a variable are brought together: at each write, or only when it is read across replicas."""

    AUTO = 0
    NONE = 1
    ON_WRITE = 2
    ON_READ = 3


class VariableAggregation(enum.Enum):
    """How the values that replicas assign to one variable become one value."""

    NONE = 0
    SUM = 1
    MEAN = 2
    ONLY_FIRST_REPLICA = 3
    ONLY_FIRST_TOWER = 3


class CommunicationImplementation(enum.Enum):
    """Which transport a collective should use. XLA chooses one per platform; RING and NCCL are kept as wishes."""

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


@dataclasses.dataclass(frozen=True)
class CommunicationOptions:
    """How a reduction should travel, per call or for a whole strategy.

    Args:
      bytes_per_pack: Neighbours travel together until a pack holds more than this many bytes, the last first; 0 joins
        small arrays only, as was measured to be best.
      timeout_seconds: How long a collective over several processes may wait before it fails by name.
      implementation: A wish; see `CommunicationImplementation`.

    >>> CommunicationOptions(implementation="ring").implementation
    <CommunicationImplementation.RING: 'RING'>
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        if not _is_number(self.bytes_per_pack, numbers.Integral) or self.bytes_per_pack < 0:
            raise ValueError(
                f"CommunicationOptions(bytes_per_pack={self.bytes_per_pack!r}): a pack cannot have a negative size, or "
                "part of a byte. Use 0 to let the library choose."
            )
        if self.timeout_seconds is not None and not (
            _is_number(self.timeout_seconds, numbers.Real) and self.timeout_seconds > 0
        ):
            raise ValueError(
                f"CommunicationOptions(timeout_seconds={self.timeout_seconds!r}): expected a number of seconds above 0, or "
                "None for no limit."
            )
        implementation = self.implementation
        if isinstance(implementation, str) and implementation.upper() in CommunicationImplementation.__members__:
            implementation = CommunicationImplementation[implementation.upper()]
        if not isinstance(implementation, CommunicationImplementation):
            raise ValueError(
                f"CommunicationOptions(implementation={self.implementation!r}): expected one of "
                f"{', '.join(CommunicationImplementation.__members__)} or an rx.CommunicationImplementation."
            )
        object.__setattr__(self, "implementation", implementation)

    @classmethod
    def parse(cls, options: CommunicationOptions | None) -> CommunicationOptions:
        """`options`, or the default ones for None; `TypeError` for anything else."""
        if options is None:
            return cls()
        if isinstance(options, cls):
            return options
        raise TypeError(f"options={options!r}: expected an rx.CommunicationOptions, or None.")

    def merge(self, other: CommunicationOptions | None) -> CommunicationOptions:
        """These options, overridden by every field of `other` that is not at its default."""
        other = CommunicationOptions.parse(other)
        defaults = CommunicationOptions()
        changed = {
            field.name: getattr(other, field.name)
            for field in dataclasses.fields(self)
            if getattr(other, field.name) != getattr(defaults, field.name)
        }
        return dataclasses.replace(self, **changed)


def _is_number(x: Any, kind: type) -> bool:
    return isinstance(x, kind) and not isinstance(x, bool)


def CollectiveHints(bytes_per_pack: int = 0, timeout_seconds: float | None = None) -> CommunicationOptions:
    """The former name of `CommunicationOptions`."""
    return CommunicationOptions(bytes_per_pack=bytes_per_pack, timeout_seconds=timeout_seconds)


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """How one call of `strategy.run` should be carried out.

    Args:
      eager: True runs the function line by line, one thread per replica, so that `print` and `pdb` work; None asks
        the strategy.
      donate: Positions of arguments whose buffers the step may reuse for its results; they must not be read again.
      concurrent: In an eager run, False lets one replica at a time proceed, in order.

    The three `experimental_` fields are accepted for callers of tf.distribute; XLA on JAX needs none of them.
    """

    eager: bool | None = None
    donate: tuple[int, ...] = ()
    concurrent: bool = True
    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: Any = None

    def __post_init__(self) -> None:
        donate = (self.donate,) if isinstance(self.donate, int) else self.donate
        if not isinstance(donate, (tuple, list)) or not all(type(i) is int and i >= 0 for i in donate):
            raise ValueError(
                f"RunOptions(donate={self.donate!r}): expected positions of arguments, counted from 0: donate=(0,)."
            )
        object.__setattr__(self, "donate", tuple(dict.fromkeys(donate)))


def is_count(x: Any, at_least: int = 1) -> bool:
    """Whether `x` is a whole number, `at_least` or more. Python takes True for one; nobody counts with it."""
    try:
        return not isinstance(x, bool) and operator.index(x) >= at_least
    except TypeError:
        return False
