"""LoRA: small matrices are trained beside a frozen base, whose weights are divided over the ranks all the same.

torchrun --nproc-per-node 2 examples/lora.py
"""

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerokit

RANK = 4  # of the adapters' matrices

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group()


class Adapted(nn.Module):
    """A frozen linear layer plus a trained update of low rank (Hu et al., arXiv:2106.09685)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)  # training starts from the base

    def forward(self, x: Tensor) -> Tensor:
        adapted: Tensor = self.base(x) + self.up(self.down(x))
        return adapted


torch.manual_seed(0)  # in practice: load the weights that were trained before
pretrained = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.Tanh()) for _ in range(4)))

# Freeze and adapt first: ZeroOptimizer divides what is there when it is built.
for name, module in list(pretrained.named_modules()):
    if isinstance(module, nn.Linear):
        pretrained.set_submodule(name, Adapted(module))
model = pretrained.to(device)

optimizer = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=3, precision="bf16", lr=3e-3)
frozen_names = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
before = {name: value.clone() for name, value in model.state_dict().items()}

samples = torch.Generator().manual_seed(1 + dist.get_rank())
losses = []
for _ in range(40):
    x = torch.randn(64, 128, generator=samples).to(device)
    loss = nn.functional.mse_loss(model(x).float(), x.roll(1, dims=1).tanh() * 0.5)
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(mean.item() / dist.get_world_size())

after = model.state_dict()  # gathers; all ranks call it
moved = {name for name, value in after.items() if not torch.equal(value, before[name])}
memory = optimizer.memory()
if dist.get_rank() == 0:
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    print(f"{trained} elements are trained, {frozen} are frozen")
    print(f"matrices that changed: {len(moved)}, of them frozen: {len(moved & frozen_names)}")
    print(f"a rank holds {memory.frozen} bytes of the frozen base, which has {2 * frozen} in bf16")
    print(f"and {memory.optimizer} bytes of masters and optimizer states")
dist.destroy_process_group()
