"""Measure whether restoring pages from a store is faster than computing them again.

`sample.py` chooses pages of one deployment and cuts them into batches, as a server's prefetch does.
`reads.py` times the batches, beside a bare loop over the same files. `writes.py` writes and removes
pages of its own. `device.py` times the steps of the device loaders over the same objects.
`estimate.py` derives times of prompts from the batches, and compares them with the prefill rate.
`prompts.py` lets a live server compute and restore prompts. `bench.py` runs them all; `report.py`
has the document and its lines.
"""
