"""The arguments of this room's classes, checked before anything is built."""

from __future__ import annotations

from zerokit.errors import UsageError
from zerokit.runtime.optimizer import ZeroOptimizer
from zerokit.sizes import BLOCK_FORMATS
from zerokit.training.islands import Islands


def require_zero_optimizer(given: object, line: str) -> None:
    """Raise `UsageError`, with the line to write, where the first argument is another object."""
    if not isinstance(given, ZeroOptimizer):
        raise UsageError(
            f"the first argument is a {type(given).__name__}: pass the ZeroOptimizer, zerokit.{line}"
        )


def islands_of(optimizer: ZeroOptimizer) -> Islands | None:
    """The optimizer's islands, if it has some."""
    return optimizer.islands if isinstance(optimizer.islands, Islands) else None


def require_islands(optimizer: ZeroOptimizer) -> Islands:
    """The optimizer's islands. Raises `UsageError` where it has none, or makes local steps already."""
    require_zero_optimizer(optimizer, "LocalSteps(optimizer, every=50)")
    islands = islands_of(optimizer)
    if islands is None:
        raise UsageError(
            "this optimizer sums gradients over all its ranks in every step, so it has no islands: build it with "
            'mesh=(islands, ranks of an island) and stage=("local", stage), such as '
            'ZeroOptimizer(model, torch.optim.AdamW, mesh=(2, 8), stage=("local", 3))'
        )
    if optimizer.local_steps is not None:
        raise UsageError("this optimizer makes local steps already: use optimizer.local_steps")
    return islands


def check_arguments(
    every: object, outer: object, fragments: object, delay: object, blend: object, wire: object
) -> None:
    """Raise `UsageError`, which says what was expected, for the first argument that does not fit."""
    if type(every) is not int or every < 1:
        raise UsageError(
            f"every={every!r}: expected the number of steps between synchronisations, at least 1"
        )
    if outer is not None and not callable(outer):
        raise UsageError(
            f"outer={outer!r}: expected a function that makes a torch optimizer from a list of parameters, such as "
            "functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True), or None for the plain mean"
        )
    if type(fragments) is not int or fragments < 1:
        raise UsageError(f"fragments={fragments!r}: expected a number of parts of the model, at least 1")
    if fragments > every:
        raise UsageError(
            f"fragments={fragments} with every={every}: each fragment has its turn in {every} steps: pass at most "
            f"{every}"
        )
    if type(delay) is not int or not 0 <= delay < every:
        raise UsageError(
            f"delay={delay!r}: expected a number of steps from 0 to {every - 1}: a fragment must arrive before its "
            f"next synchronisation, {every} steps later"
        )
    if not isinstance(blend, int | float) or isinstance(blend, bool) or not 0.0 < blend <= 1.0:
        raise UsageError(f"blend={blend!r}: expected a number over 0, and at most 1 for the result alone")
    if wire is not None and not (isinstance(wire, str) and wire in BLOCK_FORMATS):
        raise UsageError(f"wire={wire!r}: expected 'int8' or 'int4', or None for weights in fp32")
