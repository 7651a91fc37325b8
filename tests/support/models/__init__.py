"""The models that the runtime is tested with, each with its batches and its loss.

`CASES` maps a name to a `Case`; ranks in other processes look a case up by its name. Sizes are odd on purpose
(few are multiples of 64 or of a world size), and no model takes more than a few milliseconds a step.
"""

from tests.support.models import textbook, transformers, unusual
from tests.support.models.base import CASES, Batch, Case, Groups, count

#: Cases whose layouts differ most; for tests that cannot afford all of them.
FEW = ("gpt", "unit_unused_on_rank_1", "tiny_parameters", "lora")

__all__ = ["CASES", "FEW", "Batch", "Case", "Groups", "count", "textbook", "transformers", "unusual"]
