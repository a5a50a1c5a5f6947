"""Measure whether restoring pages from a store is faster than computing them again.

`sample.py` chooses pages of one deployment and cuts them into batches, as a server's prefetch does.
`reads.py` times the batches, and a bare loop over the same files. `writes.py` times writes of the
bench's own pages, and removes these pages. `device.py` times the steps of the device loaders over
objects of the same pages. `estimate.py` derives times of prompts from the times of batches, and
compares them with the prefill rate. `prompts.py` lets a live server compute and restore prompts.
`bench.py` runs all of these modules. `report.py` has the document and its lines.
"""
