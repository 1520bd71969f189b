"""What do we know about one value: is it the same on every replica, and if not, since when?"""

from dataclasses import dataclass

from replicax._locality.sites import Site


@dataclass(frozen=True, slots=True)
class Origin:
    """Where something about a value began.

    `why` completes a sentence: "became per-replica at train.py:12: the replica id was read".
    """

    seq: int
    """Grows in program order. Negative as long as an input has not been used."""
    site: Site | None
    why: str


@dataclass(frozen=True, slots=True)
class Mirrored:
    """Equal on all replicas, bit for bit."""

    reduced: Origin | None = None
    """The sum or mean over the replicas that the value is a linear function of, if it is one."""


@dataclass(frozen=True, slots=True)
class Differs:
    """Nothing is known about how the replicas' values relate."""

    origin: Origin


State = Mirrored | Differs

MIRRORED = Mirrored()


def differs(origin_why: str, site: Site | None = None) -> State:
    """The state of an input that is another one on each replica; without a site, the line that first uses it counts."""
    return Differs(Origin(-1, site, origin_why))


def origin_of(state: State) -> Origin | None:
    """Where the value became per-replica; None if it is mirrored."""
    return state.origin if isinstance(state, Differs) else None
