"""Benchmarks: a workload, trained for some steps on some ranks, measured and written down.

`worker` runs on every rank and writes the record (`record`); `tracking` mirrors a record into MLflow;
`workloads` is what is trained on what. This file imports nothing, so that names stay cheap.
"""
