"""What is trained on what: `build` makes, in a rank, the models and batches that `catalogue.workloads` names.

`models` are written here, `library` builds those of transformers and torchvision, `initialise` gives all of them their
weights. `inputs` are read from disk, `sources` draw batches from them. `own` is the user's.
"""
