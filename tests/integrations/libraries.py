"""What the ranks of these tests import, for the server that they are forked from; each only where it is installed."""

import contextlib
import warnings
from importlib import import_module

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the libraries' own
    for name in ("tests.integrations.trainers", "lightning.pytorch", "pytorch_lightning"):
        with contextlib.suppress(ImportError):
            import_module(name)
