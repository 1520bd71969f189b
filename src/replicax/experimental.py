"""The names that tf.distribute keeps under ``experimental``. Those that are ready are the same objects as elsewhere."""

from __future__ import annotations

from typing import Any, NoReturn

from replicax._errors import NotAvailableError, message
from replicax._options import CollectiveHints as CollectiveHints
from replicax._options import CommunicationImplementation as CollectiveCommunication
from replicax._options import CommunicationImplementation as CommunicationImplementation
from replicax._options import CommunicationOptions as CommunicationOptions
from replicax._strategy.central_storage import CentralStorageStrategy as CentralStorageStrategy
from replicax._strategy.multi_worker import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
from replicax._strategy.tpu import TPUStrategy as TPUStrategy
from replicax._strategy.tpu import initialize_tpu_system as initialize_tpu_system
from replicax._strategy.tpu import shutdown_tpu_system as shutdown_tpu_system
from replicax._values import ValueContext as ValueContext
from replicax.cluster import DeviceAssignment as DeviceAssignment
from replicax.cluster import DeviceOrderMode as DeviceOrderMode
from replicax.cluster import Topology as Topology

__all__ = [
    "CentralStorageStrategy",
    "CollectiveCommunication",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "DeviceAssignment",
    "DeviceOrderMode",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "PreemptionCheckpointHandler",
    "PreemptionWatcher",
    "TPUStrategy",
    "TerminationConfig",
    "Topology",
    "ValueContext",
    "initialize_tpu_system",
    "shutdown_tpu_system",
]


class _Unavailable:
    """Makes a class that can be named, tested against and documented, and says what is missing when it is made."""

    _missing: str
    _instead: tuple[str, ...] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse(type(self))


def _refuse(cls: type[_Unavailable]) -> NoReturn:
    raise NotAvailableError(
        message(f"`{cls.__name__}(...)` is not available yet", why=cls._missing, instead=cls._instead)
    )


class ParameterServerStrategy(_Unavailable):
    """Asynchronous training with variables on server processes. Not available yet."""

    _missing = (
        "What is missing are the processes that hold the variables, and the coordinator that hands out the work. They will "
        "come with `rx.ParameterServerStrategy`."
    )
    _instead = (
        "keep variables in one place, with synchronous replicas in one process: "
        "`rx.experimental.CentralStorageStrategy()`",
    )


class PreemptionCheckpointHandler(_Unavailable):
    """Saves the same step on all processes when one is told to stop. Not available yet."""

    _missing = "What is missing is the agreement of all processes on the step to save."
    _instead = ("save every few steps: `rx.CheckpointManager(...)`",)


class PreemptionWatcher(_Unavailable):
    """Tells whether this process was told to stop. Not available yet."""

    _missing = "What is missing is the watch on the platform's notices."
    _instead = ("catch SIGTERM yourself: `signal.signal(signal.SIGTERM, handler)`",)


class TerminationConfig(_Unavailable):
    """How a process ends when it was told to stop. Not available yet."""

    _missing = "It configures `PreemptionCheckpointHandler`, which is not there yet."
