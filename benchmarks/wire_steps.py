"""A step on each wire between two hosts of this machine, network namespaces joined by a slow link.

A rank of one thread a host trains a GPT in bf16 at stage 2. One process has an optimizer for each wire, which take
turns of a few steps: what disturbs the machine for a while disturbs all of them. Needs root and iproute2.

python benchmarks/wire_steps.py --mbits 100
python benchmarks/wire_steps.py --mbits 1000 --rounds 9
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a file

from benchmarks.measuring import bar_holds, machine, make_parser, plain_table, write_json
from benchmarks.slow_link import limit, on_both
from tests.support.namespaces import refusal, two_hosts

ADDRESS, PORT = "10.77.0.1", 29512
BASE = "bf16"
WIRES: dict[str, dict[str, Any]] = {
    BASE: {"wire": "bf16"},
    "int8": {"wire": "int8"},
    "int8 both ways": {"wire": "int8", "wire_updates": True},
    "int4": {"wire": "int4"},
    "int4 both ways": {"wire": "int4", "wire_updates": True},
}
SLOW = {"int8 both ways": 0.55, "int4 both ways": 0.35}
"""The largest step at 100 Mbit/s, as a share of the bf16 wire's."""
FAST = 1.03
"""What no wire may take of it at 1 Gbit/s."""


def rank_main(rank: int, model: str, batch: int, rounds: int, steps: int) -> None:
    """One rank's part; prints the seconds of a step, by wire and round."""
    import torch
    import torch.distributed as dist

    from zerokit import Precision, ZeroOptimizer
    from zerokit.bench.workloads.build import build

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{ADDRESS}:{PORT}", rank=rank, world_size=2)
    generator = torch.Generator().manual_seed(rank)
    trained = {}
    for name, options in WIRES.items():
        network = build(model)
        precision = Precision(compute=torch.bfloat16, **options)
        trained[name] = (
            network,
            ZeroOptimizer(network, torch.optim.AdamW, stage=2, precision=precision, lr=1e-3),
        )
    seconds: dict[str, list[float]] = {name: [] for name in WIRES}
    for _ in range(rounds + 1):
        for name, (network, optimizer) in trained.items():
            began = 0.0
            for step in range(steps + 1):
                if step == 1:  # what the first step waits for was sent before it
                    began = time.monotonic()
                tokens = torch.randint(0, 256, (batch, 65), generator=generator)
                optimizer.backward(network(tokens[:, :-1], tokens[:, 1:]))
                optimizer.step()
                optimizer.zero_grad()
            seconds[name].append((time.monotonic() - began) / steps)
            with optimizer.gathered():  # what it has sent has arrived
                dist.barrier()
    dist.barrier()
    print(json.dumps({name: found[1:] for name, found in seconds.items()}), flush=True)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--mbits", type=float, default=100.0, help="of the link, each way")
    parser.add_argument("--model", default="gpt-5m")
    parser.add_argument("--batch", type=int, default=1, help="sequences of 64 tokens")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="of a turn")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if (why := refusal()) is not None:
        print(f"wire_steps: {why}", file=sys.stderr)
        return 4
    with two_hosts(servers=False) as hosts:
        limit(hosts, options.mbits / 1000)
        words = [options.model, options.batch, options.rounds, options.steps]
        found = on_both(hosts, __file__, words)
    turns = {
        name: [max(both) for both in zip(*(rank[name] for rank in found), strict=True)] for name in WIRES
    }
    ratios = {
        name: median(one / base for one, base in zip(several, turns[BASE], strict=True))
        for name, several in turns.items()
    }
    write_json(options.json, {"options": vars(options) | {"json": None}, "machine": machine(), "s": turns})
    rows = [[name, f"{1000 * median(turns[name]):.0f}", f"{ratios[name]:.3f}"] for name in WIRES]
    title = f"{options.model}, {options.batch}x64 tokens, bf16, stage 2, {options.mbits:g} Mbit/s"
    print(plain_table(title, ["wire", "step, ms", "÷ bf16 wire"], rows))
    bars = SLOW if options.mbits <= 100 else dict.fromkeys(list(WIRES)[1:], FAST)
    held = [bar_holds(name, ratios[name], bar) for name, bar in bars.items()]
    return 0 if all(held) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        number, name, *numbers = sys.argv[2:]
        rank_main(int(number), name, *map(int, numbers))
        sys.exit(0)
    sys.exit(main())
