"""What is trained on what: `build` makes the models and batches that `catalogue.workloads` names.

`gpt` and `llama` are written here, `library` builds from the configurations of transformers and torchvision, `small`
holds the two smallest, `own` the user's.
"""
