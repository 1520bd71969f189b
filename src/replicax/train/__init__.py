"""What does a training run need beyond a step? A loop, checkpoints and keeping the good ones, gradients in 16 bits."""

from replicax.train._checkpoint import Checkpoint as Checkpoint
from replicax.train._checkpoint import RestoreStatus as RestoreStatus
from replicax.train._loop import Run as Run
from replicax.train._loop import evaluation as evaluation
from replicax.train._loop import fit as fit
from replicax.train._manager import CheckpointManager as CheckpointManager
from replicax.train._manager import latest_checkpoint as latest_checkpoint
from replicax.train._monitor import Monitor as Monitor
from replicax.train._precision import LossScale as LossScale
from replicax.train._store import PendingSave as PendingSave
