"""Benchmarks: train a workload for some steps on some ranks, measure it and write a record.

`benches` is a bench or a sweep from its settings to its results. `worker` runs on every rank and writes the record
(`record`); `tracking` mirrors a record into MLflow; `workloads` is what is trained on what. This file imports nothing,
so that names stay cheap.
"""
