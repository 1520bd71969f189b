"""Which device does this word mean?

Wherever a device is accepted, a `jax.Device` or the words of tf.distribute will do: ``"/device:CPU:1"``, ``"/cpu:0"``,
``"GPU:0"``, ``"/job:worker/replica:0/task:1/device:GPU:0"``. `resolve` turns either into a `jax.Device`, `canonical`
into the one full spelling. An index counts the devices of one process, as it did there, not those of the whole job.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import jax

from replicax import _host
from replicax._errors import DeviceError, DeviceSpecError, message

# The short form ("/cpu:0") may be written in either case, but only with these types. The long form ("/device:CPU:0")
# takes any type, in upper case. tf.distribute drew that line, and its tests rely on what is refused as well.
SHORT_TYPES = ("CPU", "GPU", "TPU")

# Jobs whose task number is the number of a JAX process. What other jobs have, no strategy of this process computes on.
WORKER_JOBS = ("worker", "tpu_worker")


@dataclass(frozen=True)
class DeviceString:
    """A device string taken apart; None means that the string leaves the part open.

    Example:
      >>> from replicax._devices import DeviceString
      >>> DeviceString.parse("/job:worker/task:1/gpu:0")
      DeviceString(job='worker', replica=None, task=1, type='GPU', index=0)
      >>> str(DeviceString.parse("cpu:1"))
      '/device:CPU:1'
    """

    job: str | None = None
    replica: int | None = None
    task: int | None = None
    type: str | None = None
    index: int | None = None

    @classmethod
    def parse(cls, word: str) -> DeviceString:
        """Takes `word` apart; `DeviceError` if it is no device string at all."""
        parsed = cls()
        for part in filter(None, word.split("/")):
            found = _parse_part(word, part)
            if parsed.type is not None and "type" in found:
                raise _malformed(word, part, "A device string names one device.")
            parsed = replace(parsed, **found)
        return parsed

    def filled(self, default: DeviceString) -> DeviceString:
        """This string, with the parts it leaves open taken from `default`."""
        return replace(default, **{name: part for name, part in vars(self).items() if part is not None})

    def __str__(self) -> str:
        parts = [
            None if self.job is None else f"/job:{self.job}",
            None if self.replica is None else f"/replica:{self.replica}",
            None if self.task is None else f"/task:{self.task}",
            None if self.type is None else f"/device:{self.type}:{'*' if self.index is None else self.index}",
        ]
        return "".join(part for part in parts if part is not None)


FIRST_CPU = DeviceString("localhost", 0, 0, "CPU", 0)


def resolve(word: str | jax.Device) -> jax.Device:
    """The device that `word` means.

    Parts that the word leaves open are those of the first CPU of this process, so ``""`` is that CPU and ``"GPU"`` is
    the first GPU.

    Args:
      word: A device string, or a `jax.Device`, which is returned as it is.

    Raises:
      DeviceError: If there is no such device, with a list of those that there are; a `DeviceSpecError` (also an
        `AssertionError`) if the long form is spelled in lower case, as in ``"/device:cpu:0"``.

    Example:
      >>> import jax
      >>> from replicax._devices import resolve
      >>> resolve("/cpu:1") is jax.devices("cpu")[1]
      True
    """
    if isinstance(word, jax.Device):
        return word
    if not isinstance(word, str):
        raise DeviceError(message(f"{word!r} is neither a device string such as 'cpu:0' nor a `jax.Device`"))
    wanted = DeviceString.parse(word).filled(FIRST_CPU)
    assert wanted.type is not None and wanted.index is not None  # FIRST_CPU leaves nothing open
    process = _process(word, wanted)
    there = [device for device in _devices_of(wanted.type) if device.process_index == process]
    if wanted.index >= len(there):
        raise _no_such_device(word, wanted, process)
    return there[wanted.index]


def resolve_all(words: Iterable[str | jax.Device], call: str) -> tuple[jax.Device, ...]:
    """`resolve` for a list in which no device may stand twice; `call` is the user's call, for the message."""
    if isinstance(words, (str, jax.Device)) or not isinstance(words, Iterable):
        raise _not_a_list(words, call)
    words = list(words)
    devices = tuple(resolve(word) for word in words)
    if len(set(devices)) < len(devices):
        raise _duplicates(call, words, devices)
    return devices


def canonical(word: str | jax.Device) -> str:
    """The one full spelling of a device, the same for all words that mean it. The device need not exist.

    Example:
      >>> import jax
      >>> from replicax._devices import canonical
      >>> canonical("/cpu:0") == canonical("") == canonical(jax.devices("cpu")[0])
      True
      >>> canonical("gpu:1")
      '/job:localhost/replica:0/task:0/device:GPU:1'
    """
    spelled = _spell(word) if isinstance(word, jax.Device) else DeviceString.parse(word)
    return str(spelled.filled(FIRST_CPU))


def local_devices_default() -> tuple[jax.Device, ...]:
    """The devices of this process that a strategy takes if none are named: its accelerators, or else all its CPUs."""
    _host.tune_before_start()
    return tuple(jax.local_devices())


def accelerators_or_one_cpu() -> tuple[jax.Device, ...]:
    """What tf.distribute's strategies took by default: the accelerators of this process, or else its first CPU."""
    accelerators = tuple(device for device in local_devices_default() if device.platform != "cpu")
    return accelerators or (resolve(str(FIRST_CPU)),)


def _parse_part(word: str, part: str) -> dict[str, str | int | None]:
    if match := re.fullmatch(r"job:([A-Za-z]\w*)", part):
        return {"job": match[1]}
    if match := re.fullmatch(r"(replica|task):(\d+)", part):
        return {match[1]: int(match[2])}
    if match := re.fullmatch(r"device:([A-Za-z]\w*)(?::(\d+|\*))?", part):
        if match[1] != match[1].upper():
            raise _lower_case(word, match[1])
        return {"type": match[1], "index": _index(match[2])}
    if (match := re.fullmatch(r"([A-Za-z]+)(?::(\d+|\*))?", part)) and match[1].upper() in SHORT_TYPES:
        return {"type": match[1].upper(), "index": _index(match[2])}
    raise _malformed(word, part, "A part is one of job:NAME, replica:N, task:N, device:TYPE:N, cpu:N, gpu:N, tpu:N.")


def _index(digits: str | None) -> int | None:
    return None if digits is None or digits == "*" else int(digits)


def _process(word: str, wanted: DeviceString) -> int:
    """The number of the JAX process that holds the device."""
    if wanted.job == "localhost" and wanted.task == 0:
        return jax.process_index()
    if wanted.job in WORKER_JOBS and wanted.task is not None and wanted.task < jax.process_count():
        return wanted.task
    raise _no_such_task(word, wanted)


def _devices_of(device_type: str) -> Sequence[jax.Device]:
    _host.tune_before_start()
    try:
        return jax.devices(device_type.lower())
    except RuntimeError:  # JAX knows no such platform, or none is attached
        return ()


def _spell(device: jax.Device) -> DeviceString:
    neighbours = [d for d in jax.devices(device.platform) if d.process_index == device.process_index]
    index = neighbours.index(device)
    if jax.process_count() == 1:
        return DeviceString(type=device.platform.upper(), index=index)
    return DeviceString("worker", 0, device.process_index, device.platform.upper(), index)


def _malformed(word: str, part: str, why: str) -> DeviceError:
    return DeviceError(
        message(f"{word!r} is not a device string", [repr(part)], why, ["write '/device:CPU:0', 'cpu:0' or 'GPU:1'"])
    )


def _lower_case(word: str, device_type: str) -> DeviceSpecError:
    upper = word.replace(f"device:{device_type}", f"device:{device_type.upper()}")
    return DeviceSpecError(
        message(
            f"{word!r} spells the device type in lower case",
            [repr(device_type)],
            "In the long form, after 'device:', types are upper-case; only the short form 'cpu:0' is free.",
            [f"write {upper!r}"],
        )
    )


def _no_such_task(word: str, wanted: DeviceString) -> DeviceError:
    return DeviceError(
        message(
            f"{word!r} names a task that is not among the {jax.process_count()} processes of this job",
            [f"job {wanted.job!r}, task {wanted.task}; this is process {jax.process_index()}"],
            "'localhost' with task 0 is this process, and task i of 'worker' is process i.",
            ["leave the job out for a device of this process: 'cpu:0'"],
        )
    )


def _no_such_device(word: str, wanted: DeviceString, process: int) -> DeviceError:
    have = {
        kind: [canonical(device) for device in _devices_of(kind) if device.process_index == process]
        for kind in dict.fromkeys((*SHORT_TYPES, wanted.type or ""))
    }
    instead = ["use one of the devices above"]
    if wanted.type == "CPU" and process == jax.process_index():
        instead.append(
            f"get more CPU devices with `rx.host.configure(cpu_devices={(wanted.index or 0) + 1})`,"
            " before anything asks JAX for a device or an array"
        )
    return DeviceError(
        message(
            f"{word!r} names a device that process {process} does not have",
            [f"{kind}: {_span(names)}" for kind, names in have.items() if names] or ["it has no devices"],
            "A number after the type counts the devices of one process, from 0.",
            instead,
        )
    )


def _span(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _not_a_list(given: object, call: str) -> DeviceError:
    if isinstance(given, int):
        ways = [f"`jax.devices()[:{given}]` for the first {given}"]
        return DeviceError(message(f"{call} takes a list of devices", [f"got the number {given}"], instead=ways))
    word = canonical(given) if isinstance(given, jax.Device) else given
    example = repr([word if isinstance(word, str) else "cpu:0"])
    return DeviceError(message(f"{call} takes a list of devices", [f"got {word!r} alone"], instead=[example]))


def _duplicates(call: str, words: list[str | jax.Device], devices: tuple[jax.Device, ...]) -> DeviceSpecError:
    twice = [device for device in dict.fromkeys(devices) if devices.count(device) > 1]
    return DeviceSpecError(
        message(
            f"No duplicates allowed in `devices` argument: {call} names a device more than once",
            [
                f"{canonical(device)}: {', '.join(repr(w) for w, d in zip(words, devices, strict=True) if d == device)}"
                for device in twice
            ],
            "Every replica needs a device of its own.",
            ["name each device once", "for two replicas on one CPU, make two CPU devices: `rx.host.configure`"],
        )
    )
