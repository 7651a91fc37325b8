"""What is trained on what: `catalogue` knows every name (standard library only), `build` makes models and batches.

`configs` holds sizes as plain data; `gpt` and `llama` are written here, `library` builds from the configurations of
transformers and torchvision, `small` holds the two smallest, `own` the user's. `fit` tells beforehand what cannot fit.
"""
