"""replicax: write a training step once, for one replica, and run it on any placement of devices.

The names below stand in the order in which a reader meets the ideas: strategies, variables, gradients and optimizers,
data, training runs, contexts, values, errors. The modules at the end hold what belongs to one subject.
"""

from replicax import _host

_host.tune_at_import()  # before anything can start JAX's backend

with _host.collecting_later():  # these import nearly everything
    from replicax import experimental, keras, nnx, train

# isort: off

# strategies
from replicax._strategy.base import Strategy as Strategy
from replicax._strategy.one_device import OneDeviceStrategy as OneDeviceStrategy
from replicax._strategy.mirrored import MirroredStrategy as MirroredStrategy
from replicax._strategy.multi_worker import MultiWorkerMirroredStrategy as MultiWorkerMirroredStrategy
from replicax._strategy.tpu import TPUStrategy as TPUStrategy
from replicax.experimental import ParameterServerStrategy as ParameterServerStrategy
from replicax._strategy.extended import StrategyExtended as StrategyExtended
from replicax._options import RunOptions as RunOptions
from replicax._run.function import function as function

# variables
from replicax._variables.variable import Variable as Variable
from replicax._options import VariableSynchronization as VariableSynchronization
from replicax._options import VariableAggregation as VariableAggregation
from replicax._variables.creation import variable_creator_scope as variable_creator_scope
from replicax._strategy.layout import fully_sharded as fully_sharded
from replicax._strategy.layout import partition_rules as partition_rules
from replicax._strategy.layout import PartitionRules as PartitionRules
from replicax._strategy.layout import shard as shard

# gradients and optimizers
from replicax._variables.gradients import grad as grad
from replicax._variables.gradients import value_and_grad as value_and_grad
from replicax.optim import Optimizer as Optimizer
from replicax.optim import TrainState as TrainState
from replicax.train._accumulate import accumulate as accumulate
from replicax._losses import mean as mean
from replicax._losses import compute_average_loss as compute_average_loss
from replicax._losses import scale_regularization_loss as scale_regularization_loss

# data
from replicax._input.dataset import DistributedDataset as DistributedDataset
from replicax._input.dataset import DistributedIterator as DistributedIterator
from replicax._input.options import InputContext as InputContext
from replicax._input.options import InputOptions as InputOptions
from replicax._input.options import InputReplicationMode as InputReplicationMode
from replicax._input.options import AutoShardPolicy as AutoShardPolicy
from replicax._validity import valid_rows as valid_rows
from replicax._validity import valid_counts as valid_counts

# training runs
from replicax._run.steps import MultiStepContext as MultiStepContext
from replicax.train._checkpoint import Checkpoint as Checkpoint
from replicax.train._manager import CheckpointManager as CheckpointManager
from replicax.cluster import Server as Server

# contexts
from replicax._context import ReplicaContext as ReplicaContext
from replicax._context import get_replica_context as get_replica_context
from replicax._context import get_strategy as get_strategy
from replicax._context import has_strategy as has_strategy
from replicax._context import in_cross_replica_context as in_cross_replica_context
from replicax._context import experimental_set_strategy as experimental_set_strategy

# values and reductions
from replicax._values import PerReplica as PerReplica
from replicax._values import DistributedValues as DistributedValues
from replicax._values import ValueContext as ValueContext
from replicax._cross.slices import IndexedSlices as IndexedSlices
from replicax._strategy.where import locality as locality
from replicax._locality import assert_mirrored as assert_mirrored
from replicax._strategy.describe import visualize as visualize
from replicax._options import ReduceOp as ReduceOp
from replicax._cross.ops import CrossDeviceOps as CrossDeviceOps
from replicax._cross.ops import NcclAllReduce as NcclAllReduce
from replicax._cross.ops import HierarchicalCopyAllReduce as HierarchicalCopyAllReduce
from replicax._cross.ops import ReductionToOneDevice as ReductionToOneDevice
from replicax._options import CommunicationOptions as CommunicationOptions
from replicax._options import CommunicationImplementation as CommunicationImplementation
from replicax._options import CollectiveHints as CollectiveHints

# errors
from replicax._errors import ReplicaxError as ReplicaxError
from replicax._errors import LocalityError as LocalityError
from replicax._errors import ContextError as ContextError
from replicax._errors import VariableError as VariableError
from replicax._errors import StaticArgumentError as StaticArgumentError
from replicax._errors import StructureError as StructureError
from replicax._errors import InputError as InputError
from replicax._errors import OutOfRangeError as OutOfRangeError
from replicax._errors import DeviceError as DeviceError
from replicax._errors import HostError as HostError
from replicax._errors import CheckpointError as CheckpointError
from replicax._errors import CheckpointDamagedError as CheckpointDamagedError
from replicax._errors import CheckpointMismatchError as CheckpointMismatchError
from replicax._errors import NotAvailableError as NotAvailableError
from replicax._errors import NotConsumedError as NotConsumedError

# modules
from replicax import cluster as cluster
from replicax import cluster_resolver as cluster_resolver
from replicax import data as data
from replicax import experimental as experimental
from replicax import host as host
from replicax import keras as keras
from replicax import metrics as metrics
from replicax import nnx as nnx
from replicax import train as train


def _show_public_names() -> None:
    """Messages, pages and tracebacks show the path that users import: `replicax.Variable`."""
    for value in list(globals().values()):
        if getattr(value, "__module__", "").startswith("replicax."):
            value.__module__ = "replicax"


_show_public_names()
