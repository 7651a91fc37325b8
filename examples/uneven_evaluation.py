"""Evaluation on data that does not divide evenly: every rank runs the model equally often, some of it for nothing.

    torchrun --nproc-per-node 2 examples/uneven_evaluation.py

At stage 3 the ranks hold the weights together: a forward pass gathers them, so it needs every rank. If one rank has a
batch more than the others, it waits for weights that nobody sends. So all ranks run as many batches as the one with
the most, and what is repeated counts with weight 0. (With few data there is another way: inside
`with optimizer.gathered():` all weights are whole, and every rank runs as often as it likes. It takes the memory of
the whole model.)
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import zerokit

BATCH, SAMPLES = 8, 83  # neither 83 nor its parts are multiples of 8

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group()
rank, world = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))).to(device)
optimizer = zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=3, precision="fp32", lr=1e-3)

generator = torch.Generator().manual_seed(1)
inputs = torch.randn(SAMPLES, 16, generator=generator).to(device)
targets = torch.randn(SAMPLES, 16, generator=generator).to(device)
# Uneven on purpose: the first rank has the most.
shares = torch.tensor_split(
    torch.arange(SAMPLES), [SAMPLES * (r + 2) // (world + 1) for r in range(world - 1)]
)
own = shares[rank].tolist()


def errors(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The mean squared error of each sample."""
    found: torch.Tensor = model(x) - y
    return found.square().mean(dim=1)


@torch.no_grad()
def evaluate() -> tuple[float, int]:
    """The mean error over all samples of all ranks, and their number."""
    # One all-reduce before the loop tells how many batches the longest rank has.
    batches = torch.tensor([-(-len(own) // BATCH)], device=device)
    dist.all_reduce(batches, dist.ReduceOp.MAX)
    total = torch.zeros(2, dtype=torch.float64, device=device)  # the sum of errors, and of weights
    for number in range(int(batches.item())):
        chosen = own[number * BATCH : (number + 1) * BATCH]
        weights = torch.tensor([1.0] * len(chosen) + [0.0] * (BATCH - len(chosen)), device=device)
        padded = chosen + [0] * (BATCH - len(chosen))  # any sample will do: it counts for nothing
        total[0] += (errors(inputs[padded], targets[padded]) * weights).sum()
        total[1] += weights.sum()
    dist.all_reduce(total)
    return total[0].item() / total[1].item(), int(total[1].item())


padded_mean, counted = evaluate()

# The other way, and the proof: whole weights, no two ranks in step, the same mean.
with optimizer.gathered(), torch.no_grad():
    sums = torch.stack([errors(inputs[[i]], targets[[i]]).double().sum() for i in own]).sum()
dist.all_reduce(sums)

print(f"rank {rank} has {len(own)} samples, {-(-len(own) // BATCH)} batches", flush=True)
if rank == 0:
    print(f"mean error over {counted} samples: {padded_mean:.6f}")
    print(f"the same inside gathered(): {sums.item() / SAMPLES:.6f}")
dist.destroy_process_group()
