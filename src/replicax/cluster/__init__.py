"""Who else is in this job, and how do I reach them? Clusters, the schedulers that describe them, and TPU slices.

Start with the resolver of your scheduler, or with `SimpleClusterResolver` and a `ClusterSpec`; give it to a strategy.
What you pass to a resolver always beats what the environment says.
"""

from replicax.cluster._distribute_config import DistributeConfig as DistributeConfig
from replicax.cluster._resolvers.base import ClusterResolver as ClusterResolver
from replicax.cluster._resolvers.gce import GCEClusterResolver as GCEClusterResolver
from replicax.cluster._resolvers.hostlist import expand_hostlist as expand_hostlist
from replicax.cluster._resolvers.hostlist import expand_tasks_per_node as expand_tasks_per_node
from replicax.cluster._resolvers.kubernetes import KubernetesClusterResolver as KubernetesClusterResolver
from replicax.cluster._resolvers.kubernetes import KubernetesExecutableLocation as KubernetesExecutableLocation
from replicax.cluster._resolvers.sagemaker import SageMakerClusterResolver as SageMakerClusterResolver
from replicax.cluster._resolvers.simple import SimpleClusterResolver as SimpleClusterResolver
from replicax.cluster._resolvers.slurm import SlurmClusterResolver as SlurmClusterResolver
from replicax.cluster._resolvers.tf_config import TFConfigClusterResolver as TFConfigClusterResolver
from replicax.cluster._resolvers.tpu import TPUClusterResolver as TPUClusterResolver
from replicax.cluster._resolvers.tpu import TPUSystemMetadata as TPUSystemMetadata
from replicax.cluster._resolvers.union import UnionClusterResolver as UnionClusterResolver
from replicax.cluster._resolvers.union import UnionResolver as UnionResolver
from replicax.cluster._roles import collective_leader as collective_leader
from replicax.cluster._roles import coordination_leader as coordination_leader
from replicax.cluster._roles import global_id_in_cluster as global_id_in_cluster
from replicax.cluster._roles import id_in_cluster as id_in_cluster
from replicax.cluster._roles import is_chief as is_chief
from replicax.cluster._roles import normalize_cluster_spec as normalize_cluster_spec
from replicax.cluster._roles import validate_cluster as validate_cluster
from replicax.cluster._roles import worker_count as worker_count
from replicax.cluster._server import Server as Server
from replicax.cluster._server import ServerDef as ServerDef
from replicax.cluster._server import serve_from_tf_config as serve_from_tf_config
from replicax.cluster._spec import ClusterDef as ClusterDef
from replicax.cluster._spec import ClusterSpec as ClusterSpec
from replicax.cluster._spec import JobDef as JobDef
from replicax.cluster._topology import SINGLE_CORE_ASSIGNMENT as SINGLE_CORE_ASSIGNMENT
from replicax.cluster._topology import DeviceAssignment as DeviceAssignment
from replicax.cluster._topology import DeviceOrderMode as DeviceOrderMode
from replicax.cluster._topology import Topology as Topology
