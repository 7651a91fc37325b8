"""Private names of PyTorch, each with what it is used for: where a version changes one, this is the place.

What is called for each parameter or unit is torch's own object under another name, as a call around it would cost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo import compiled_autograd
from torch._dynamo.decorators import skip
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.autograd import profiler
from torch.distributed._composable.contract import REGISTRY_KEY
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

_Args = ParamSpec("_Args")
_Result = TypeVar("_Result")

# ---- optimizers


def leaves_out_steps(optimizer: Optimizer) -> bool:
    """Whether all its kernels leave a step out where a tensor on the device says so, as for `torch.amp.GradScaler`."""
    return getattr(optimizer, "_step_supports_amp_scaling", False) and all(
        # With dampening a momentum cannot begin as zeros, and that of a first step that is left out is no number.
        group.get("fused") and not group.get("dampening")
        for group in optimizer.param_groups
    )


@contextmanager
def leaving_out(optimizer: Optimizer, left_out: Tensor | None) -> Iterator[None]:
    """A context in which steps change nothing if `left_out` (0-d, bool) is true, which is not read on the host."""
    if left_out is None:
        yield
        return
    optimizer.__dict__["found_inf"] = left_out.float()
    try:
        yield
    finally:
        del optimizer.__dict__["found_inf"]


# ---- parameters

without_torch_function: Any = torch._C.DisableTorchFunctionSubclass
"""A context in which guarded parameters are read as plain tensors."""

share_memory: Callable[[Tensor, Tensor], bool] = vars(torch._C)["_is_alias_of"]
"""Whether two tensors lie in one storage; no layout of either is refused."""


def elements_share_memory(tensor: Tensor) -> bool:
    """Whether elements of a dense tensor lie in one place, as after `expand`; only what torch is sure of."""
    return tensor.layout == torch.strided and torch._debug_has_internal_overlap(tensor) == 1


def point_at(parameter: Tensor, data: Tensor) -> None:
    """Let `parameter` be a view of other memory, and stay the same object to autograd and to modules."""
    parameter.data = data


def change_class(parameter: nn.Parameter, to: type[nn.Parameter]) -> None:
    """Change a parameter's class and keep its identity."""
    parameter.__class__ = to


make_subclass: Callable[[type[Tensor], Tensor], Tensor] = torch.Tensor._make_subclass
"""A tensor of a class, over the memory of another one."""

NEW_PARAMETER = nn.Parameter.__new__.__code__
"""What runs in a frame of `nn.Parameter(...)`."""

STATE_OF_MODULE = nn.Module._save_to_state_dict.__code__
"""What runs in a frame of a module that fills a state dict."""

LOAD_OF_MODULE = nn.Module._load_from_state_dict.__code__
"""What runs in a frame of a module that loads one."""


def take_gradient(parameter: nn.Parameter) -> Tensor | None:
    """`parameter.grad`, which is None afterwards."""
    gradient, parameter.grad = parameter.grad, None
    return gradient


def become(parameter: nn.Parameter, real: nn.Parameter) -> None:
    """Give `parameter` the tensor of `real`; attributes and hooks stay."""
    real.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, real)
    # Hooks stay with the object, but autograd calls those of its new tensor: they are set again.
    parameter._backward_hooks = parameter._backward_hooks
    hooks: Any = parameter._post_accumulate_grad_hooks
    parameter._post_accumulate_grad_hooks = hooks


def set_versions(tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
    """Set the version counter of each tensor, by which autograd knows of changes; as many versions as tensors."""
    set_version: Any = torch._C._autograd._unsafe_set_version_counter
    try:
        set_version(tuple(tensors), tuple(versions))
    except TypeError:  # torch 2.6 takes one tensor and one number
        for tensor, version in zip(tensors, versions, strict=True):
            set_version(tensor, version)


# ---- autograd's engine

_graph_task: Callable[[], int] = torch._C._current_graph_task_id


def in_backward() -> bool:
    """Whether autograd's engine is running in this thread, even while a checkpoint recomputes a forward."""
    return _graph_task() != -1


keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the backward pass under way was asked to retain its graph."""

will_reach: Callable[[Any], bool] = torch._C._will_engine_execute_node
"""Whether the backward pass under way accumulates in this node; RuntimeError in one of `autograd.grad`."""

at_end_of_backward: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)
"""Let the engine call a function once the backward pass under way is over, for which there is no hook."""

# ---- torch.func, torch.compile and the profiler

NO_CONTEXT: AbstractContextManager[Any] = nullcontext()
_transform_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level


def transforming() -> bool:
    """Whether torch.func (vmap, grad, jvp) is active; hooks on its tensors are unreliable."""
    return _transform_level() is not None


def outside_transforms() -> AbstractContextManager[Any]:
    """A context in which collectives see plain tensors, even while torch.func is active."""
    return temporarily_clear_interpreter_stack() if transforming() else NO_CONTEXT


_set_compiler: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame

excluded_from_graphs: Callable[[Callable[_Args, _Result]], Callable[_Args, _Result]] = skip
"""Excludes one function from torch.compile's graphs, and not what it calls."""


def uncompiled(function: Callable[_Args, _Result]) -> Callable[_Args, _Result]:
    """A function that torch.compile excludes from its graphs, with everything that it calls."""

    @functools.wraps(function)
    def call(*args: _Args.args, **kwargs: _Args.kwargs) -> _Result:
        compiler = _set_compiler(None)
        try:
            return function(*args, **kwargs)
        finally:
            _set_compiler(compiler)

    return excluded_from_graphs(call)


def compiling() -> bool:
    """Whether torch.compile is tracing this."""
    return torch._guards.CompileContext.try_get() is not None


def compiles_backward() -> bool:
    """Whether compiled autograd is on."""
    return bool(compiled_autograd.compiled_autograd_enabled)


def uncompiled_module(model: nn.Module) -> nn.Module:
    """What a module of torch.compile compiles, whose names are the model's own; any other module itself."""
    if isinstance(model, torch._dynamo.OptimizedModule):
        inner: nn.Module = model._orig_mod
        return inner
    return model


functions_in_scripts: Callable[[], dict[int, str]] = torch.jit._builtins._get_builtin_table
"""By identity, the functions that torch.jit.script knows."""


def profiling() -> bool:
    """Whether a profiler runs: ranges cost time without one, too."""
    return bool(profiler._is_profiler_enabled)


# ---- containers and modules

leaves_of: Callable[[Any], list[Any]] = torch.utils._pytree.tree_leaves
"""What nested containers hold, registered ones included."""

map_leaves: Callable[..., Any] = torch.utils._pytree.tree_map
"""Nested containers with each leaf replaced by what a function makes of it."""

BATCH_NORMS = nn.modules.batchnorm._NormBase
"""The base of all modules that keep running statistics."""

SPECTRAL_NORM = _SpectralNorm
"""What `torch.nn.utils.parametrizations.spectral_norm` registers."""


def applied_to(module: nn.Module) -> Sequence[str]:
    """Which of `fully_shard()`, `replicate()` and their like a module is under; `checkpoint()` is one."""
    return list(module.__dict__.get(REGISTRY_KEY, ()))


def called_by_ddp(model: nn.Module) -> bool:
    """Whether a DistributedDataParallel around `model` runs its forward now."""
    active = nn.parallel.DistributedDataParallel._active_ddp_module
    return active is not None and any(module is model for module in active.modules())


# ---- process groups


def store_of(group: dist.ProcessGroup) -> Any:
    """The store through which the ranks of a group found each other."""
    return dist.distributed_c10d._get_process_group_store(group)


def default_group() -> dist.ProcessGroup:
    """The group of all ranks."""
    return dist.distributed_c10d._get_default_group()


def group_name(group: dist.ProcessGroup) -> str:
    """What torch calls a group, equally on all of its ranks; "" for one that it has not made."""
    return str(dist.distributed_c10d._world.pg_names.get(group, ""))


@contextmanager
def naming_groups(name: str) -> Iterator[None]:
    """A context in which a new group of some ranks is called `name`, and the default group is not split for it.

    torch counts the groups that a rank knows of, which differs between the ranks of a pipeline: they would wait for
    each other under different names. A bound default group would be split, in which all of its ranks must take part.
    """
    default, naming = default_group(), dist.distributed_c10d._hash_ranks_to_str
    bound, default.bound_device_id = default.bound_device_id, None
    dist.distributed_c10d._hash_ranks_to_str = lambda ranks: name
    try:
        yield
    finally:
        default.bound_device_id = bound
        dist.distributed_c10d._hash_ranks_to_str = naming


def timeout_for(group: dist.ProcessGroup, device: torch.device) -> Any:
    """The time-out of a group's backend for `device`, None where it does not say; RuntimeError without a backend."""
    return getattr(getattr(group._get_backend(device), "options", None), "_timeout", None)
