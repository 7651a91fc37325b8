"""`torch.optim.Optimizer`'s interface, forwarded to an optimizer over flat tensors."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from torch import Tensor
from torch.optim import Optimizer

from zerokit.errors import UsageError
from zerokit.runtime.guard import ticket_of

_AVERAGED = "the model has its averaged weights: leave `with ema.applied():` first"


class States(defaultdict[Any, Any]):
    """An optimizer's states by master. Asked by a parameter of the model it raises `UsageError`."""

    def __missing__(self, key: Any) -> Any:
        _require_master(key)
        return super().__missing__(key)

    def pop(self, key: Any, *default: Any) -> Any:
        _require_master(key)
        return super().pop(key, *default)


def _require_master(key: Any) -> None:
    ticket = ticket_of(key) if isinstance(key, Tensor) else None
    if ticket is not None and not ticket.name.startswith("master of "):
        raise UsageError(
            f"optimizer.state of {ticket.name}: states belong to flat tensors that are sharded across ranks, those of "
            "optimizer.param_groups; none can be read, removed or replaced for one parameter of the model"
        )


def _forwarded(name: str) -> Any:
    """An attribute of the inner optimizer, to read and to set."""

    def assign(optimizer: ForwardingOptimizer, value: Any) -> None:
        setattr(optimizer._inner, name, value)

    return property(lambda optimizer: getattr(optimizer._inner, name), assign)


class ForwardingOptimizer(Optimizer):
    """An optimizer whose groups, options and states are those of `inner`, and whose steps may be refused."""

    def __init__(self, inner: Optimizer) -> None:
        # `Optimizer.__init__` is not called: everything else that it would create is forwarded.
        self._inner = inner
        inner.state = States(dict, inner.state)
        self.refusal = ""  # why `step` is refused; "" where it is not
        # Hooks run while gradients are guarded: what they read as whole parameters are flat ones.
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()

    param_groups: list[dict[str, Any]] = _forwarded("param_groups")
    defaults: dict[str, Any] = _forwarded("defaults")
    state: Any = _forwarded("state")

    @contextmanager
    def with_averages(self) -> Iterator[None]:
        """A context in which the model has the averaged weights from `zerokit.Ema`, and `step` is refused."""
        before, self.refusal = self.refusal, _AVERAGED
        try:
            yield
        finally:
            self.refusal = before

    def require_own_weights(self, call: str) -> None:
        """Raise `UsageError` while the model has its averaged weights."""
        if self.refusal == _AVERAGED:
            raise UsageError(
                f"{call} inside `with ema.applied():`, where weights and averages are exchanged: leave the "
                "context first"
            )

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        raise UsageError(
            "the layout is fixed when ZeroOptimizer is built: pass all groups as "
            "params=[...], and freeze or unfreeze before"
        )

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        # torch.amp.GradScaler asks for this before it steps.
        raise UsageError(
            "zerokit scales the loss itself: use precision='fp16' and optimizer.backward(loss), without GradScaler"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError(
            "a ZeroOptimizer cannot be copied or pickled, because its communicators belong to this process: use "
            "state_dict(), or zerokit.save(), which any number of ranks can load"
        )
