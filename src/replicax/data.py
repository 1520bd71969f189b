"""The door to input: where global batches come from, and how they are handed out."""

from replicax._input.arrays import ArrayBatches as ArrayBatches
from replicax._input.arrays import from_arrays as from_arrays
