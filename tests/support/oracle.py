# mypy: disable-error-code="no-untyped-call"
"""What zerokit's results are compared with, written without zerokit.

`train_alone` is one process that plays all ranks: it computes each rank's gradients one after the other,
multiplies them by 1/N, sums them in rank order and steps the same torch optimizer, over copies of the parameters
that are padded to whole vectors: a fused kernel's vector tail rounds differently, and that is a matter of the
kernel, not of the parallelism under test. tests/bench/engines compares with DistributedDataParallel and others.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.models import CASES, Case
from tests.support.optimizers import FUSED, MIXES, OPTIMIZERS
from tests.support.training import Run, Trajectory, build_seeded, digest, draw

PADDING = 64

#: Classes of mixes that step flat tensors as well.
FLAT = (torch.optim.AdamW, torch.optim.SGD)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class PaddedOptimizer:
    """Torch optimizers over one flat, padded fp32 tensor a parameter, which views it or a rounded copy.

    Classes that look at whole tensors have tensors of the parameters' own shapes.
    """

    def __init__(self, model: nn.Module, case: Case, run: Run) -> None:
        self.own = {path: DTYPES[name] for path, name in by_module(run.precision).items()}
        self.dtype = self.own.pop("*")
        self.dtypes = {
            p: dtype for path, dtype in self.own.items() for p in model.get_submodule(path).parameters()
        }
        for frozen in (p for p in model.parameters() if not p.requires_grad):
            frozen.data = frozen.data.to(self.dtypes.get(frozen, self.dtype))
        self.parameters: list[nn.Parameter] = []
        self.masters: list[Tensor] = []
        if run.optimizer in MIXES:
            classes = MIXES[run.optimizer](model)
            self.inner = [
                self._inner(cls, groups, {"fused": True} if cls is torch.optim.AdamW else {}, cls in FLAT)
                for cls, groups in classes.items()
            ]
            return
        cls, options = OPTIMIZERS[run.optimizer]
        groups = case.groups(model) if case.groups else [{"params": list(model.parameters())}]
        self.inner = [self._inner(cls, groups, options | ({"fused": True} if run.optimizer in FUSED else {}))]

    def _inner(
        self, cls: Any, groups: list[dict[str, Any]], options: dict[str, Any], flat: bool = True
    ) -> Any:
        made = []
        for group in groups:
            members = [p for p in group["params"] if p.requires_grad]
            masters = [self._master(p, flat) for p in members]
            self.parameters += members
            self.masters += masters
            made.append({**group, "params": masters})
        return cls(made, **options)

    def _master(self, parameter: nn.Parameter, flat: bool) -> Tensor:
        size = max(1, math.ceil(parameter.numel() / PADDING)) * PADDING
        master = torch.zeros(size if flat else parameter.numel())
        master[: parameter.numel()] = parameter.detach().flatten()
        # In half precision `to` makes a copy, aligned like its source; in fp32 it is the master itself.
        dtype = self.dtypes.get(parameter, self.dtype)
        parameter.data = master.to(dtype)[: parameter.numel()].view(parameter.shape)
        return master if flat else master.view(parameter.shape)

    def exact(self, model: nn.Module) -> list[tuple[str, Tensor]]:
        """The model's parameters by name, in fp32 where they are trained."""
        pairs = zip(self.parameters, self.masters, strict=True)
        masters = {p: master.detach().view(-1)[: p.numel()].view(p.shape) for p, master in pairs}
        return [(name, masters.get(p, p)) for name, p in model.named_parameters()]

    def step(self, gradients: list[Tensor | None]) -> None:
        for master, gradient in zip(self.masters, gradients, strict=True):
            master.grad = torch.zeros_like(master)
            if gradient is not None:
                master.grad.view(-1)[: gradient.numel()] = gradient.flatten()
        for inner in self.inner:
            inner.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter.dtype != torch.float32:
                parameter.data.copy_(master.view(-1)[: parameter.numel()].view(parameter.shape))


def by_module(precision: Any) -> dict[str, str]:
    """A precision for all modules, or by the paths of some."""
    return dict(precision) if isinstance(precision, dict) else {"*": precision}


def cast(args: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Positional floating-point tensors in the compute dtype."""
    return tuple(a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)


def global_norm(gradients: list[Tensor | None], norm_type: float = 2.0) -> float:
    """The norm of all gradients as one vector, in fp64, rounded to fp32 at the end."""
    flat = torch.cat([g.double().flatten() for g in gradients if g is not None])
    return float(torch.linalg.vector_norm(flat, norm_type).float())


def clip(gradients: list[Tensor | None], run: Run, trajectory: Trajectory) -> None:
    """Records the norm, and scales the gradients down to `run.clip` as torch does."""
    if run.clip is None:
        return
    norm = global_norm(gradients, run.norm_type)
    trajectory.norms.append(norm)
    if norm > run.clip:
        coefficient = run.clip / (torch.tensor(norm) + 1e-6)  # in fp32, as in torch's function
        for gradient in gradients:
            if gradient is not None:
                gradient.mul_(coefficient)


def train_alone(
    name: str, run: Run, world: int, wire: torch.dtype | None = None, *, later: tuple[int, int] = (0, 0)
) -> list[Trajectory]:
    """One process in the place of `world` ranks; the trajectories of all of them.

    `later`: a step, and the smaller number of ranks that go on from there. With a `wire` each rank's share of a
    gradient is rounded to that dtype before it is added. Buffers start equal on all ranks and are each rank's own from
    then on.
    """
    case = CASES[name]
    model = build_seeded(case, 0)
    optimizer = PaddedOptimizer(model, case, run)
    model.register_forward_pre_hook(lambda _, args: cast(args, optimizer.dtype))
    for path, dtype in optimizer.own.items():
        module = model.get_submodule(path)
        module.register_forward_pre_hook(lambda _, args, dtype=dtype: cast(args, dtype))
        module.register_forward_hook(lambda _, args, output: output.to(optimizer.dtype))
    trajectories = [Trajectory() for _ in range(world)]
    buffers = [[b.clone() for b in model.buffers()] for _ in range(world)]
    for step in range(run.steps):
        total: list[Tensor | None] = [None] * len(optimizer.parameters)
        here = trajectories[: later[1]] if 0 < later[0] <= step else trajectories
        for rank, trajectory in enumerate(here):
            for live, own in zip(model.buffers(), buffers[rank], strict=True):
                live.copy_(own)
            for micro in range(run.micro):
                loss = case.loss(model, draw(case, run, step, micro, rank)) / run.micro
                loss.backward()
                trajectory.losses.append(loss.item())
            for own, live in zip(buffers[rank], model.buffers(), strict=True):
                own.copy_(live)
            for index, parameter in enumerate(optimizer.parameters):
                if parameter.grad is not None:
                    share = parameter.grad.float() * (1.0 / len(here))
                    if wire is not None:
                        share = share.to(wire).float()
                    before = total[index]
                    total[index] = share if before is None else before + share
                parameter.grad = None
        norms = Trajectory()
        clip(total, run, norms)
        for trajectory in trajectories:
            trajectory.norms += norms.norms
        optimizer.step(total)
    for rank, trajectory in enumerate(trajectories):
        trajectory.weights = digest(optimizer.exact(model))
        names = [name for name, _ in model.named_buffers()]
        trajectory.buffers = digest(zip(names, buffers[rank], strict=True))
    return trajectories
