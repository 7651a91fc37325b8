"""`torch.optim.Optimizer`'s interface beside the step: hooks, and what `ZeroOptimizer` refuses of it with advice."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

from torch.optim import Optimizer

from zerokit.errors import UsageError


class TorchInterface(Optimizer):
    """Hooks of steps and of states, which torch's own `register_...` methods fill."""

    def __init__(self) -> None:
        # `Optimizer.__init__` is not called: it would begin with groups and states.
        # Hooks run while gradients are guarded: what they read as whole parameters are flat ones.
        self._optimizer_step_pre_hooks = OrderedDict()
        self._optimizer_step_post_hooks = OrderedDict()
        self._optimizer_state_dict_pre_hooks = OrderedDict()
        self._optimizer_state_dict_post_hooks = OrderedDict()
        self._optimizer_load_state_dict_pre_hooks = OrderedDict()
        self._optimizer_load_state_dict_post_hooks = OrderedDict()

    def hooked_state(self, take: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """What `take` returns, between the hooks of `state_dict`."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state: dict[str, Any] = self._through(self._optimizer_state_dict_post_hooks.values(), take())
        return state

    def hooked_load(self, state: Mapping[str, Any], load: Callable[[Mapping[str, Any]], None]) -> None:
        """Call `load` with the state, between the hooks of `load_state_dict`."""
        load(self._through(self._optimizer_load_state_dict_pre_hooks.values(), state))
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _through(self, hooks: Iterable[Callable[..., Any]], state: Mapping[str, Any]) -> Any:
        """The state as hooks leave it: each may return another one."""
        for hook in hooks:
            changed = hook(self, state)
            state = state if changed is None else changed
        return state

    def join_hook(self, **kwargs: Any) -> NoReturn:
        """Refuse torch's `Join`, which calls this for each of its members."""
        raise UsageError(
            "torch's Join lets ranks run out of batches at different times, but all ranks of a ZeroOptimizer make "
            "equally many passes: give them equally many batches (DistributedSampler does), or let a rank without one "
            "compute the loss of any batch times 0"
        )


def refuse_step_options(options: Iterable[str]) -> NoReturn:
    """The error for arguments of `step` beside the closure."""
    raise UsageError(
        f"step({', '.join(f'{name}=...' for name in options)}): the optimizer's own step is called without arguments, "
        "over flat parameters: set options in optimizer.param_groups, or when ZeroOptimizer is built"
    )
