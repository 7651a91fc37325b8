"""A plain training loop: accumulation, clipping, a schedule, figures, a checkpoint.

torchrun --nproc-per-node 2 examples/plain_loop.py
"""

import os
import shutil

import torch
import torch.distributed as dist
from torch import nn

import zerokit

RUN = "runs/plain_loop"  # where the checkpoint goes
STEPS, MICRO_BATCHES = 20, 2

# torchrun tells every process its rank. On a GPU machine each takes the GPU of its own number.
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))).to(device)

# The one line that differs from a plain loop: the optimizer takes the model over and divides it among the ranks.
optimizer = zerokit.ZeroOptimizer(
    model, torch.optim.AdamW, stage=2, precision="bf16", lr=3e-3, weight_decay=0.01
)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)

# Every rank draws other samples: the gradients are averaged over them all.
samples = torch.Generator().manual_seed(1 + rank)
task = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(device)


def micro_batch_loss() -> torch.Tensor:
    """The loss of the next 32 samples of this rank."""
    x = torch.randn(32, 64, generator=samples).to(device)
    return nn.functional.mse_loss(model(x).float(), torch.tanh(x @ task))


for step in range(1, STEPS + 1):
    # Inside accumulate() gradients add up on this rank; the last backward, outside, sums them over the ranks.
    with optimizer.accumulate():
        for _ in range(MICRO_BATCHES - 1):
            optimizer.backward(micro_batch_loss() / MICRO_BATCHES)
    loss = micro_batch_loss() / MICRO_BATCHES
    optimizer.backward(loss)
    norm = optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if step % 5 == 0:
        mean = loss.detach() * MICRO_BATCHES  # this rank's; for the log, the mean over all ranks
        dist.all_reduce(mean)
        if rank == 0:
            rate = schedule.get_last_lr()[0]
            print(f"step {step}: loss {mean.item() / world:.4f}, norm {norm.item():.3f}, rate {rate:.2e}")

# Every rank writes its own piece. Any number of ranks can load it, at any stage: see resume.py.
if rank == 0:
    shutil.rmtree(RUN, ignore_errors=True)  # of an earlier try: a saved step is never replaced
dist.barrier()
saved = zerokit.save(RUN, optimizer, step=STEPS, extra={"schedule": schedule.state_dict()})

if rank == 0:
    memory, moved = optimizer.memory(), optimizer.traffic()
    print(f"a rank holds {memory.total / 1e3:.0f} kB of model state; a step moves {moved.bytes / 1e3:.0f} kB")
    print(f"saved {saved}")
dist.destroy_process_group()
