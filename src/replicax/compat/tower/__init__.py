"""What was it called in 2018? The names of ``tf.contrib.distribute``, as a thin front over the same engine.

A *tower* is what was later called a replica. Code of that time ports by changing its imports; new code should use the
names of `replicax` itself. Everything here may be mixed with them: `rx.Variable` made in a tower strategy's scope is an
ordinary variable.
"""

from replicax._options import VariableAggregation as VariableAggregation
from replicax._options import VariableSynchronization as VariableSynchronization
from replicax._run.steps import MultiStepContext as MultiStepContext
from replicax.cluster import DistributeConfig as DistributeConfig
from replicax.compat.tower._contexts import TowerContext as TowerContext
from replicax.compat.tower._contexts import get_cross_tower_context as get_cross_tower_context
from replicax.compat.tower._contexts import get_distribution_strategy as get_distribution_strategy
from replicax.compat.tower._contexts import get_loss_reduction as get_loss_reduction
from replicax.compat.tower._contexts import get_tower_context as get_tower_context
from replicax.compat.tower._contexts import has_distribution_strategy as has_distribution_strategy
from replicax.compat.tower._contexts import increment_var as increment_var
from replicax.compat.tower._contexts import require_tower_context as require_tower_context
from replicax.compat.tower._cross_tower_ops import AllReduceCrossTowerOps as AllReduceCrossTowerOps
from replicax.compat.tower._cross_tower_ops import CrossTowerOps as CrossTowerOps
from replicax.compat.tower._cross_tower_ops import (
    ReductionToOneDeviceCrossTowerOps as ReductionToOneDeviceCrossTowerOps,
)
from replicax.compat.tower._input import InputIterator as InputIterator
from replicax.compat.tower._input import PerDeviceDataset as PerDeviceDataset
from replicax.compat.tower._server import run_standard_tensorflow_server as run_standard_tensorflow_server
from replicax.compat.tower._steps import StandardInputStep as StandardInputStep
from replicax.compat.tower._steps import StandardSingleLossStep as StandardSingleLossStep
from replicax.compat.tower._steps import Step as Step
from replicax.compat.tower._strategies import CollectiveAllReduceStrategy as CollectiveAllReduceStrategy
from replicax.compat.tower._strategies import MirroredStrategy as MirroredStrategy
from replicax.compat.tower._strategies import OneDeviceStrategy as OneDeviceStrategy
from replicax.compat.tower._strategies import ParameterServerStrategy as ParameterServerStrategy
from replicax.compat.tower._strategies import TPUStrategy as TPUStrategy
from replicax.compat.tower._strategy import DistributionStrategy as DistributionStrategy
from replicax.compat.tower._update_context import UpdateContext as UpdateContext
from replicax.compat.tower._update_context import get_update_device as get_update_device
from replicax.compat.tower._values import MapOutput as MapOutput
from replicax.compat.tower._values import Mirrored as Mirrored
from replicax.compat.tower._values import PerDevice as PerDevice
from replicax.train._monitor import Monitor as Monitor


def _show_public_names() -> None:
    """Messages and pages show the path that users import: `tower.MirroredStrategy`."""
    for value in list(globals().values()):
        if getattr(value, "__module__", "").startswith("replicax.compat.tower."):
            value.__module__ = "replicax.compat.tower"


_show_public_names()
