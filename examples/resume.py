"""A checkpoint of two ranks, continued by one and by three, with the losses of the run that was never interrupted.

torchrun --nproc-per-node 2 examples/resume.py              trains 8 steps, and saves after the 4th
torchrun --nproc-per-node 1 examples/resume.py --resume     continues with the 5th
torchrun --nproc-per-node 3 examples/resume.py --resume     so does this
"""

import os
import shutil
import sys

import torch
import torch.distributed as dist
from torch import nn

import zerokit

RUN = "runs/resume"
BATCH, STEPS, SAVED = 12, 8, 4  # 12 samples a step over all ranks, whatever their number

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()
resuming = "--resume" in sys.argv

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3))).to(device)
# The stage may change, too.
optimizer = zerokit.ZeroOptimizer(
    model, torch.optim.AdamW, stage=3 if resuming else 2, precision="fp32", lr=1e-2
)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)

first = 1
if resuming:
    # Every rank reads only the bytes that it needs, and proves them. What was saved as extra comes back.
    extra = zerokit.load(RUN, optimizer)
    schedule.load_state_dict(extra["schedule"])
    first = extra["step"] + 1
elif rank == 0:
    shutil.rmtree(RUN, ignore_errors=True)  # of an earlier try
dist.barrier()

for step in range(first, STEPS + 1):
    # The batch depends on the step alone; each rank takes its part of it.
    batch = torch.randn(BATCH, 32, generator=torch.Generator().manual_seed(step)).to(device)
    x = batch[rank::world]
    loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1).tanh())
    optimizer.backward(loss)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    mean = loss.detach()
    dist.all_reduce(mean)
    if rank == 0:
        print(f"step {step} on {world} ranks: loss {mean.item() / world:.6f}")
    if step == SAVED and not resuming:
        zerokit.save(RUN, optimizer, step=step, extra={"step": step, "schedule": schedule.state_dict()})

if rank == 0 and not resuming:
    print("now: torchrun --nproc-per-node 1 examples/resume.py --resume, and the same with 3")
dist.destroy_process_group()
