"""Workloads: `build` makes the models and batches of `catalogue.workloads` in a rank.

`models` are written here, `library` builds those of transformers and torchvision, `initialise` gives all of them their
weights. `inputs` are read from disk, `sources` draw batches from them. `own` is the user's.
"""
