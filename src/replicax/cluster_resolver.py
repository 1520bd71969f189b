"""What are the resolvers called in tf.distribute? `replicax.cluster` holds everything about clusters."""

from replicax.cluster import ClusterResolver as ClusterResolver
from replicax.cluster import GCEClusterResolver as GCEClusterResolver
from replicax.cluster import KubernetesClusterResolver as KubernetesClusterResolver
from replicax.cluster import KubernetesExecutableLocation as KubernetesExecutableLocation
from replicax.cluster import SageMakerClusterResolver as SageMakerClusterResolver
from replicax.cluster import SimpleClusterResolver as SimpleClusterResolver
from replicax.cluster import SlurmClusterResolver as SlurmClusterResolver
from replicax.cluster import TFConfigClusterResolver as TFConfigClusterResolver
from replicax.cluster import TPUClusterResolver as TPUClusterResolver
from replicax.cluster import UnionClusterResolver as UnionClusterResolver
from replicax.cluster import UnionResolver as UnionResolver
