"""replicax: write a training step once, for one replica, and run it on any placement of devices."""

from replicax import _host

_host.tune_at_import()

from replicax._context import ReplicaContext as ReplicaContext
from replicax._context import experimental_set_strategy as experimental_set_strategy
from replicax._context import get_replica_context as get_replica_context
from replicax._context import get_strategy as get_strategy
from replicax._context import has_strategy as has_strategy
from replicax._context import in_cross_replica_context as in_cross_replica_context
from replicax._cross.slices import IndexedSlices as IndexedSlices
from replicax._errors import ContextError as ContextError
from replicax._errors import LocalityError as LocalityError
from replicax._locality import assert_mirrored as assert_mirrored
from replicax._options import CommunicationImplementation as CommunicationImplementation
from replicax._options import CommunicationOptions as CommunicationOptions
from replicax._options import ReduceOp as ReduceOp
from replicax._options import RunOptions as RunOptions
from replicax._options import VariableAggregation as VariableAggregation
from replicax._options import VariableSynchronization as VariableSynchronization
from replicax._run.function import function as function
from replicax._strategy.base import Strategy as Strategy
from replicax._strategy.extended import StrategyExtended as StrategyExtended
from replicax._strategy.mirrored import MirroredStrategy as MirroredStrategy
from replicax._strategy.one_device import OneDeviceStrategy as OneDeviceStrategy
from replicax._strategy.where import locality as locality
from replicax._validity import valid_rows as valid_rows
from replicax._values import PerReplica as PerReplica
from replicax._values import ValueContext as ValueContext
from replicax._variables.creation import variable_creator_scope as variable_creator_scope
from replicax._variables.gradients import grad as grad
from replicax._variables.gradients import value_and_grad as value_and_grad
from replicax._variables.variable import Variable as Variable
from replicax.optim import Optimizer as Optimizer
