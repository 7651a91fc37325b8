"""Two islands that synchronise once in ten steps: between them a slow link is enough.

torchrun --nproc-per-node 2 examples/local_steps.py     two islands of one rank
torchrun --nproc-per-node 4 examples/local_steps.py     two islands of two ranks
"""

import os
import shutil
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import zerokit

RUN = Path("runs/local_steps")
EVERY, STEPS = 10, 60

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4))).to(device)
# The inner axis of the mesh is an island, at any stage; "local": no gradients cross the outer axis.
# Fragments are whole units, and layers as small as these would all join to one.
optimizer = zerokit.ZeroOptimizer(
    model,
    torch.optim.AdamW,
    mesh=(2, world // 2),
    stage=("local", 2),
    precision="fp32",
    bucket_mb=0.001,
    lr=1e-2,
)
# DiLoCo's outer optimizer. Two fragments take turns, and each may take five steps on its way.
outer = partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
local = zerokit.LocalSteps(optimizer, every=EVERY, outer=outer, fragments=2, delay=5)

held_out = torch.randn(256, 32, generator=torch.Generator().manual_seed(99)).to(device)


def validate() -> float:
    """The error on held-out data."""
    with torch.no_grad():
        return nn.functional.mse_loss(model(held_out), held_out.roll(1, dims=1).tanh()).item()


first = validate()
samples = torch.Generator().manual_seed(1 + rank)
for _ in range(STEPS):
    x = torch.randn(16, 32, generator=samples).to(device)
    loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1).tanh())
    optimizer.backward(loss)
    optimizer.clip_grad_norm_(1.0)  # the norm is that of the island
    optimizer.step()  # counts the steps, and synchronises when it is time
    optimizer.zero_grad()

apart = validate()
local.synchronize()  # after the last step: all islands have equal weights
last = validate()

if rank == 0:
    shutil.rmtree(RUN, ignore_errors=True)
dist.barrier()
zerokit.save(RUN, optimizer, step=STEPS)  # each island into a run of its own, all whole

for island in range(2):
    if rank == island * (world // 2):
        print(f"island {island}: validated {first:.4f}, {apart:.4f} by itself, {last:.4f} together")
if rank == 0:
    round_of_it = sum(one.bytes for name, one in local.traffic().by_operation.items() if "outer" in name)
    every_step = 2 * 4 * optimizer.layout.trainable_numel * EVERY
    print(f"a round moves {round_of_it} bytes between the islands; gradients would move {every_step}")
    print(f"anchor and momentum take {local.memory().optimizer} bytes on this rank")
dist.destroy_process_group()
