"""Workloads: `build` makes the models and batches of `catalogue.workloads` in a rank.

`models` are written here and say how weights are drawn, `library` builds those of transformers and torchvision.
`inputs` are read from disk. `own` is the user's.
"""
