"""Training that survives lost ranks and lost nodes: torchrun starts it anew with those that are left, or that came.

torchrun --nproc-per-node 2 examples/elastic.py    trains to the end
torchrun --nproc-per-node 1 examples/elastic.py    goes on from two ranks, or three, that did not come to it

Restarted ranks of torch 2.13 find the addresses of the former ones and call in vain, unless torchrun is told:

export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
torchrun --nproc-per-node 2 --max-restarts 1 examples/elastic.py --kill     rank 1 kills itself, once
torchrun --nnodes 1:2 --nproc-per-node 2 --max-restarts 3 --rdzv-backend c10d --rdzv-endpoint node-0:29400 \\
    --rdzv-id 1 examples/elastic.py                                         on one node or two, as they come and go
"""

import os
import shutil
import signal
import sys

import torch
import torch.distributed as dist
from torch import nn

import zerokit

RUN = "runs/elastic"  # shared by all nodes, and saved seldom
MEMORY = os.environ.get("MEMORY", f"/dev/shm/elastic-{os.getuid()}")  # of each node, and copied often
SAMPLES, BATCH = 144, 4  # samples of the whole job, samples a rank and step
SAVE_EVERY, COPY_EVERY = 5, 2  # steps

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()  # other ones after each restart

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(3))).to(device)
optimizer = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=2, precision="fp32", lr=1e-2)

step = sample = 0
if zerokit.list_steps([MEMORY, RUN], optimizer):  # of whatever number of ranks and nodes
    extra = zerokit.load([MEMORY, RUN], optimizer)  # the run is read only if it has a newer step
    step, sample = extra["step"], extra["sample"]
# It is called inside step(), which has trained one more batch than `sample` says.
copies = zerokit.Copies(
    optimizer,
    MEMORY,
    copies=2,
    every=COPY_EVERY,
    step=step,
    extra=lambda done: {"step": done, "sample": sample + world * BATCH},
)

while sample < SAMPLES:
    for group in optimizer.param_groups:
        # By samples: steps differ in size with the number of ranks.
        group["lr"] = 1e-2 * (1 - sample / SAMPLES)
    # The place in the data is counted in samples of the whole job, and sample i depends on i alone: whatever the number
    # of ranks, a step takes the next ones, and none is repeated or left out.
    mine = range(sample + rank * BATCH, sample + (rank + 1) * BATCH)
    x = torch.stack([torch.randn(32, generator=torch.Generator().manual_seed(i)) for i in mine]).to(device)
    loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1).tanh())
    optimizer.backward(loss)
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    first, step, sample = sample, step + 1, sample + world * BATCH
    mean = loss.detach()
    dist.all_reduce(mean)
    if rank == 0:
        print(
            f"step {step} on {world} ranks: samples {first} to {sample - 1}, loss {mean.item() / world!r}",
            flush=True,
        )
    if step % SAVE_EVERY == 0 or sample >= SAMPLES:
        # Where the newest step was damaged and an older one taken, its number comes again.
        zerokit.save(RUN, optimizer, step=step, extra={"step": step, "sample": sample}, overwrite=True)
    if "--kill" in sys.argv and rank == 1 and step == 7 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        copies.wait()  # so that always the same steps are repeated
        os.kill(os.getpid(), signal.SIGKILL)  # as the kernel or a scheduler does

copies.wait()
dist.barrier()
if os.environ["LOCAL_RANK"] == "0":
    shutil.rmtree(
        MEMORY, ignore_errors=True
    )  # all is trained and saved: a killed job leaves it for the next one
if rank == 0:
    print(f"{sample} samples are trained in {step} steps")
dist.destroy_process_group()
