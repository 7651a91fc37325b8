"""An exponential moving average of the weights: each rank averages its own shard, and evaluation borrows the result.

torchrun --nproc-per-node 2 examples/ema.py
"""

import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zerokit

RUN, EXPORT = Path("runs/ema/run"), Path("runs/ema/averaged")

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group()
rank = dist.get_rank()

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3))).to(device)
optimizer = zerokit.ZeroOptimizer(model, torch.optim.SGD, stage=3, precision="bf16", lr=1.0)
before = optimizer.memory().optimizer

# The average is one more state of the optimizer, so it is divided, saved and resharded as its other states are.
ema = zerokit.Ema(optimizer, decay=0.95)

held_out = torch.randn(256, 32, generator=torch.Generator().manual_seed(99)).to(device)


def validate() -> float:
    """The error on held-out data, with the weights that the model has now."""
    with torch.no_grad():
        return nn.functional.mse_loss(model(held_out).float(), held_out.roll(1, dims=1).tanh()).item()


samples = torch.Generator().manual_seed(1 + rank)
for _ in range(150):
    x = torch.randn(4, 32, generator=samples).to(device)  # small batches: the weights jump about
    noise = torch.randn(4, 32, generator=samples).to(device)
    loss = nn.functional.mse_loss(model(x).float(), x.roll(1, dims=1).tanh() + noise)
    optimizer.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    ema.update()  # no communication: each rank averages what it has updated

own = validate()
with ema.applied():  # all ranks enter: the model has its averaged weights until the end of the block
    averaged = validate()
again = validate()

if rank == 0:
    shutil.rmtree(RUN.parent, ignore_errors=True)
dist.barrier()
zerokit.save(RUN, optimizer, step=150)  # with the average, as a stream of its own
if rank == 0:
    zerokit.consolidate(RUN, EXPORT, stream="ema")  # the averaged weights, whole, in one safetensors file
    print(f"validated: {own:.4f} with the weights, {averaged:.4f} with their average, {again:.4f} afterwards")
    print(f"the average takes {optimizer.memory().optimizer - before} bytes on this rank")
    print(f"exported {EXPORT / 'model.safetensors'}")
dist.destroy_process_group()
