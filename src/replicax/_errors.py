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

from collections.abc import Iterable


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


class DeviceError(ReplicaxError, ValueError):
    """A device was named that this process does not have."""


class DeviceSpecError(DeviceError, AssertionError):
    """A device string in a spelling that is not allowed, or a list that names a device twice."""


class VariableError(ReplicaxError, ValueError):
    """A variable was created, read or assigned in a way that its synchronization and aggregation do not allow."""


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


class NotConsumedError(CheckpointError, AssertionError):
    """A restore left saved values unused or objects without a value, and the caller had asked for neither."""


class NotADatasetError(InputError, TypeError):
    """What was given as a dataset cannot be gone through batch by batch."""
