"""The options of `zerokit bench`: what is run, how often, and where its results go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from zerokit.bench.catalogue.engines import ENGINES
from zerokit.bench.catalogue.workloads import WORKLOADS
from zerokit.bench.record.settings import DEVICES, PRECISIONS, WIRES, Settings
from zerokit.cli.lists import CommaList, Name, Range

_F = TypeVar("_F", bound=Callable[..., Any])
_COUNT = click.IntRange(min=1)
_DEFAULTS = Settings()
DEFAULT_REPEATS = 3
STEPS_A_ROUND = 12

_OPTIONS = (
    click.option(
        "--engine",
        type=CommaList(click.Choice(list(ENGINES))),
        default=_DEFAULTS.engine,
        show_default=True,
        metavar="NAME,…",
        help=f"Training engines: {', '.join(ENGINES)}.",
    ),
    click.option(
        "--model",
        type=CommaList(Name(lambda: list(WORKLOADS))),
        default=_DEFAULTS.model,
        show_default=True,
        metavar="NAME,…",
        help=f"Workloads: {', '.join(WORKLOADS)}; or package.module:factory for your own, which returns a "
        "zerokit.bench.workloads.own.Own.",
    ),
    click.option(
        "--stage",
        type=CommaList(Range(0, 3)),
        metavar="0-3,…",
        help="ZeRO stage: 0 shards nothing, 1 optimizer state, 2 also gradients, 3 also parameters.  "
        "[default: each engine's own, zerokit's is 2]",
    ),
    click.option(
        "--mesh",
        type=CommaList(click.STRING),
        metavar="MxS,…",
        help="Two axes: M groups (nodes, say) of S ranks; --stage is then that of the inner axis. zerokit and fsdp2.",
    ),
    click.option(
        "--outer-stage",
        type=CommaList(Range(0, 3)),
        metavar="0-3,…",
        help="ZeRO stage of the mesh's outer axis, at most --stage; 0 with --stage 3 is HSDP.  [default: --stage]",
    ),
    click.option(
        "--precision",
        type=CommaList(click.Choice(PRECISIONS)),
        metavar="NAME,…",
        help="Precision of the computation: fp32, bf16 or fp16.  [default: bf16 on CUDA, fp32 on a CPU]",
    ),
    click.option(
        "--wire",
        type=CommaList(click.Choice(WIRES)),
        default=_DEFAULTS.wire,
        show_default=True,
        metavar="NAME,…",
        help="Dtype of gradients between ranks: the engine's own, or bf16: zerokit sums them in fp32, ddp by "
        "torch's hook.",
    ),
    click.option("--device", type=click.Choice(DEVICES), help="[default: cuda where there is any]"),
    click.option(
        "--nodes",
        type=CommaList(_COUNT),
        metavar="N,…",
        help="Nodes; simulated here unless --launcher says otherwise.  [default: all there are; 1 here]",
    ),
    click.option(
        "--nproc-per-node",
        type=CommaList(_COUNT),
        metavar="N,…",
        help="Ranks of each node.  [default: its visible CUDA devices; 1 on a CPU]",
    ),
    click.option(
        "--batch-size",
        type=CommaList(_COUNT),
        metavar="N,…",
        default=str(_DEFAULTS.batch_size),
        show_default=True,
        help="Samples in a micro-batch of one rank.",
    ),
    click.option(
        "--seq-len",
        type=CommaList(_COUNT),
        metavar="N,…",
        help=f"Tokens in a sequence, for language models.  [default: {_DEFAULTS.seq_len}, or as many as the model has "
        "positions]",
    ),
    click.option(
        "--image-size",
        type=_COUNT,
        metavar="N",
        help="Pixels on each side, for image models.  [default: the model's]",
    ),
    click.option(
        "--accumulate",
        type=CommaList(_COUNT),
        metavar="N,…",
        default=str(_DEFAULTS.accumulate),
        show_default=True,
        help="Micro-batches in a step.",
    ),
    click.option(
        "--bucket-mb",
        type=CommaList(click.FloatRange(min=0, min_open=True)),
        metavar="MIB,…",
        help="Largest unit of neighbouring small modules, in MiB of fp32.  [default: the engine's]",
    ),
    click.option(
        "--steps",
        type=_COUNT,
        metavar="N",
        help=f"Measured steps.  [default: {_DEFAULTS.steps}; {STEPS_A_ROUND} in each of several rounds]",
    ),
    click.option(
        "--warmup",
        type=click.IntRange(min=0),
        metavar="N",
        help="Steps before the measured ones.  [default: until step times are steady]",
    ),
    click.option(
        "--repeats",
        type=_COUNT,
        metavar="N",
        help="Rounds through all cells, every second one in reverse order. They show the noise between runs.  "
        f"[default: {DEFAULT_REPEATS} for several cells, else 1]",
    ),
    click.option(
        "--twin/--no-twin",
        default=True,
        show_default=True,
        help="Also train each cell without communication, in turn with the cell. The difference is the cost of "
        "communication.",
    ),
    click.option(
        "--lr",
        type=click.FloatRange(min=0),
        metavar="X",
        default=_DEFAULTS.lr,
        show_default=True,
        help="AdamW's learning rate.",
    ),
    click.option(
        "--clip",
        type=click.FloatRange(min=0),
        metavar="X",
        default=_DEFAULTS.clip,
        show_default=True,
        help="Largest gradient norm; 0 turns clipping off, and the norm is not measured.",
    ),
    click.option(
        "--seed", type=int, default=_DEFAULTS.seed, show_default=True, help="Seed of weights and batches."
    ),
    click.option(
        "--data",
        metavar="PATH",
        help="A file or a folder, 'standard-library' (the text of this Python's own sources) or 'synthetic'.  "
        "[default: that text for language models, else synthetic]",
    ),
    click.option(
        "--save",
        metavar="RUN",
        help="Write checkpoints into this run directory, at the end and as --save-every says. The command fails "
        "before training if the directory already holds later steps.",
    ),
    click.option("--save-every", type=_COUNT, metavar="K", help="Also save after every K-th step."),
    click.option(
        "--background",
        is_flag=True,
        help="Save in the background, beside the steps that follow; their times include it.",
    ),
    click.option(
        "--resume", is_flag=True, help="Continue from the newest checkpoint in --save, if there is one."
    ),
    click.option(
        "--elastic",
        is_flag=True,
        help="Continue from --save with the ranks that remain when others are killed, and with more when nodes join. "
        "zerokit restarts ranks on this machine; torchrun restarts them elsewhere. The run ends at step --steps, and "
        "--save-every is a tenth of that by default. One record covers all parts. Implies --no-twin.",
    ),
    click.option(
        "--max-restarts",
        type=click.IntRange(min=0),
        metavar="N",
        default=3,
        show_default=True,
        help="Most restarts with --elastic, for ranks on this machine.",
    ),
    click.option(
        "--output",
        type=click.Path(path_type=Path),
        help="A folder for the record or the sweep; for a single bench also a file that ends in .json.  "
        "[default: zerokit-bench/]",
    ),
    click.option(
        "--continue",
        "continued",
        envvar="ZEROKIT_BENCH_CONTINUE",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Continue the sweep in DIR: run the cells that are missing, failed or were interrupted.",
    ),
    click.option(
        "--json",
        "as_json",
        envvar="ZEROKIT_BENCH_JSON",
        is_flag=True,
        help="Print only the record, or the sweep with its records, on stdout.",
    ),
    click.option(
        "--tracking-uri",
        help="Where MLflow keeps the run.  [default: MLFLOW_TRACKING_URI, else sqlite:///mlflow.db]",
    ),
    click.option("--experiment", default="zerokit-bench", show_default=True, help="MLflow experiment."),
    click.option("--no-mlflow", is_flag=True, help="Write the record only."),
)


GROUPS = {
    "What is trained (comma lists make a sweep)": (
        *(
            "engine",
            "model",
            "stage",
            "mesh",
            "outer_stage",
            "precision",
            "wire",
            "nodes",
            "nproc_per_node",
            "batch_size",
            "seq_len",
        ),
        *("accumulate", "bucket_mb"),
    ),
    "How it is trained": ("device", "image_size", "lr", "clip", "seed", "data"),
    "How it is measured": ("steps", "warmup", "repeats", "twin"),
    "Checkpoints": ("save", "save_every", "background", "resume", "elastic", "max_restarts"),
    "Results": ("output", "continued", "as_json", "tracking_uri", "experiment", "no_mlflow"),
}
"""Headings of the help, and the options below each."""


def bench_options(function: _F) -> _F:
    """Decorate a command with them, listed by its help in the order above."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function
