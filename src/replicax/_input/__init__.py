"""Which rows reach which replica?

`plan` is the arithmetic, `batch` one global batch on the host, `arrays` and `sources` say where batches come from,
`feed` carries them to the devices, `dataset` is what the user iterates over.
"""
