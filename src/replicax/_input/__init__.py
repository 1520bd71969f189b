"""Which rows reach which replica?

In the order in which a row passes through: `arrays`, `files`, `rows` and `sources` say where batches come from, `plan` is
the arithmetic of dividing them, `batch` is one of them on the host, `steps` what one step takes, `feed` how it gets to
the devices, `ahead` and `reading` when. `dataset` is what the user iterates over, `distribute` what makes it, `explain`
tells about it.
"""
