"""What did the high-level loops of 2018 want to know? Which strategy trains, which evaluates, and in which cluster.

Those loops (`Estimator`) are not rebuilt here, but programs still pass the tuple around.
"""

from typing import Any, NamedTuple


class DistributeConfig(NamedTuple):
    """How a training job is distributed: a strategy to train with, one to evaluate with, and a cluster to run in.

    >>> from replicax.cluster import DistributeConfig
    >>> DistributeConfig(remote_cluster={"worker": ["a:2222"]})
    DistributeConfig(train_distribute=None, eval_distribute=None, remote_cluster={'worker': ['a:2222']})
    """

    train_distribute: Any = None
    eval_distribute: Any = None
    remote_cluster: Any = None
