"""The door to input: where global batches come from, and how they are handed out."""

from replicax._input.arrays import ArrayBatches as ArrayBatches
from replicax._input.arrays import from_arrays as from_arrays
from replicax._input.dataset import DistributedDataset as DistributedDataset
from replicax._input.dataset import DistributedIterator as DistributedIterator
from replicax._input.explain import Explanation as Explanation
from replicax._input.files import FileBatches as FileBatches
from replicax._input.files import from_files as from_files
from replicax._input.options import AutoShardPolicy as AutoShardPolicy
from replicax._input.rows import ArrayRows as ArrayRows
