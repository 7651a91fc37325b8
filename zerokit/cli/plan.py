"""`zerokit plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from zerokit.bench.catalogue.workloads import WORKLOADS
from zerokit.cli.bench_options import setting_option
from zerokit.cli.work import EXISTING, Name, json_option, print_json
from zerokit.planning.hardware import DEVICES
from zerokit.sizes import HOMES

_EPILOG = """\b
For example:
  zerokit plan llama-8b --gpus 64 --device h100-80 --nodes 8 --seq-len 4096
  zerokit plan ./config.json --gpus 8 --device a100-80 --samples-per-step 256
  zerokit plan llama-8b --devices h100-80x4,a100-40x4
\b
Exit codes: 0 ok, 2 wrong use, 4 nothing fits.
"""


def _by_module(given: tuple[str, ...]) -> dict[str, int]:
    """Stages by the paths of modules."""
    found = {}
    for one in given:
        path, _, stage = one.rpartition("=")
        if not path or not stage.isdecimal():
            raise click.BadParameter(f"{one!r}: expected a module's path and its stage, such as backbone=3.")
        found[path] = int(stage)
    return found


@click.command(epilog=_EPILOG)
@click.argument("model", type=Name(lambda: list(WORKLOADS)))
@click.option("--gpus", type=click.IntRange(min=1), metavar="N", help="Number of ranks, one per device.")
@click.option(
    "--device",
    type=Name(lambda: ["cpu", *DEVICES]),
    metavar="NAME",
    help=f"Kind of device: {', '.join(DEVICES)}, or cpu for ranks on hosts.  [default: from --cluster or --from]",
)
@click.option(
    "--devices",
    metavar="KINDxN,…",
    help="Kinds of devices by rank in place of --gpus and --device, such as h100-80x4,l40s-48x4: shares and batches "
    "are planned for them.",
)
@setting_option("nodes", "Number of nodes.", "nodes of 8 devices, or as in --cluster", several=False)
@click.option(
    "--cluster",
    type=EXISTING,
    metavar="FILE",
    help="Devices and links: a TOML file (see docs/plan.md) or the output of zerokit doctor --json.",
)
@click.option(
    "--network",
    "network_gbit",
    type=click.FloatRange(min=0, min_open=True),
    metavar="GBIT",
    help="Bandwidth of a node to other nodes, in Gbit/s.  [default: 400 or 200 per device, as in NVIDIA's DGX]",
)
@click.option(
    "--from",
    "record",
    type=EXISTING,
    metavar="RECORD",
    help="Take the device's speed from this record of a zerokit bench on one rank.",
)
@setting_option("stage", "ZeRO stages to choose from; on two axes those of the inner one.")
@setting_option("outer_stage", "Stages of the outer axis to choose from.")
@click.option(
    "--module-stage",
    "module_stages",
    multiple=True,
    metavar="PATH=STAGE",
    callback=lambda context, option, given: _by_module(given),
    help="A stage that the module at PATH has in every cell, such as backbone=3; can be repeated.",
)
@setting_option("mesh", "Meshes to choose from; 1xN is one axis.", "1xN, nodes × devices")
@setting_option("batch_size", "Micro-batches of one rank to choose from.", "1 to 64")
@setting_option("accumulate", "Micro-batches in a step to choose from.", "1")
@click.option(
    "--samples-per-step",
    type=click.IntRange(min=1),
    metavar="N",
    help="Samples in a step over all ranks; --accumulate follows from it and the micro-batch.",
)
@setting_option(
    "seq_len", "Tokens in a sequence.", "2048, or the model's number of positions if lower", several=False
)
@setting_option("precision", "Precisions to choose from.", "bf16 on CUDA devices, fp32 on hosts")
@click.option(
    "--recompute/--no-recompute",
    default=None,
    help="Consider only cells that recompute blocks in backward, or only those that do not.  [default: both]",
)
@setting_option(
    "optimizer",
    "adamw, or muon: Muon for the matrices of the blocks, AdamW for the rest.",
    "adamw",
    several=False,
)
@click.option(
    "--states",
    type=click.Choice([*HOMES, "any"]),
    help="Where masters and states are between steps, from where they visit the device: on the host, or on disk. With "
    "fp8 they are on the device, and moments in eight bits.  [default: device; where nothing fits host; else disk or "
    "fp8]",
)
@setting_option("bucket_mb", "As in ZeroOptimizer.", "by the model's size", several=False)
@click.option(
    "--all", "every", is_flag=True, help="Show every cell, not only the best of each stage and mesh."
)
@json_option("Print every cell as one JSON document on stdout.")
@click.option(
    "--page",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also write an HTML page with pictures.",
)
@click.pass_context
def command(
    context: click.Context, /, *, model: str, every: bool, as_json: bool, page: Path | None, **options: Any
) -> None:
    """Predict which stages and meshes fit, how fast they are, and which to choose.

    MODEL is a workload of zerokit bench, package.module:factory, or the path of a Hugging Face config.json. It is run
    once on tensors without memory; no rank is started and no GPU is needed. Every combination of stage, mesh,
    micro-batch and recomputation gets its memory at the peak and the time of a step.
    """
    from rich.console import Console

    from zerokit.bench.plans.ask import plain, plan

    console = Console(stderr=True, highlight=False)
    with console.status("looking at the model"):
        found = plan(model, **options | {"optimizer": options["optimizer"] or "adamw"})
    if page is not None:
        from zerokit.bench.report.plan_page import write_plan

        write_plan(found, page)
    if as_json:
        print_json(plain(found))
    else:
        from zerokit.terminal.plan import show

        show(found, every=every, page=page)
    context.exit(0 if found.fitting else 4)
