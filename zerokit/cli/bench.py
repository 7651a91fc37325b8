"""`zerokit bench`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import click

from zerokit.bench.data import STANDARD_LIBRARY
from zerokit.bench.settings import DEVICES, PRECISIONS, Settings
from zerokit.errors import UsageError

_COUNT = click.IntRange(min=1)
_DEFAULTS = Settings()


@click.command(epilog="On this machine N nodes are N torchrun agents: real ranks, one loopback wire.")
@click.option(
    "--model",
    default=_DEFAULTS.model,
    help="What to train.",
    show_default=True,
)
@click.option(
    "--stage",
    type=click.IntRange(0, 3),
    default=_DEFAULTS.stage,
    show_default=True,
    help="ZeRO stage: 0 shards nothing, 1 optimizer state, 2 also gradients, 3 also parameters.",
)
@click.option(
    "--precision",
    type=click.Choice(PRECISIONS),
    help="Of the computation.  [default: bf16 on CUDA, fp32 on a CPU]",
)
@click.option("--device", type=click.Choice(DEVICES), help="[default: cuda where there is any]")
@click.option(
    "--nodes", type=_COUNT, default=_DEFAULTS.nodes, show_default=True, help="Nodes to simulate here."
)
@click.option(
    "--nproc-per-node",
    type=_COUNT,
    default=_DEFAULTS.nproc_per_node,
    show_default=True,
    help="Ranks of each node.",
)
@click.option(
    "--batch-size",
    type=_COUNT,
    default=_DEFAULTS.batch_size,
    show_default=True,
    help="Sequences a rank and micro-batch.",
)
@click.option(
    "--seq-len",
    type=_COUNT,
    default=_DEFAULTS.seq_len,
    show_default=True,
    help="Tokens a sequence; a token is a byte.",
)
@click.option(
    "--accumulate", type=_COUNT, default=_DEFAULTS.accumulate, show_default=True, help="Micro-batches a step."
)
@click.option("--steps", type=_COUNT, default=_DEFAULTS.steps, show_default=True, help="Measured steps.")
@click.option(
    "--warmup",
    type=click.IntRange(min=0),
    help="Steps before those.  [default: until they take a steady time]",
)
@click.option(
    "--bucket-mb",
    type=click.FloatRange(min=0, min_open=True),
    help="Largest unit of neighbouring small modules, in MiB of fp32.  [default: the runtime's]",
)
@click.option(
    "--lr",
    type=click.FloatRange(min=0),
    default=_DEFAULTS.lr,
    show_default=True,
    help="AdamW's learning rate.",
)
@click.option(
    "--clip",
    type=click.FloatRange(min=0),
    default=_DEFAULTS.clip,
    show_default=True,
    help="Largest gradient norm; 0 leaves gradients alone and the norm unmeasured.",
)
@click.option("--seed", type=int, default=_DEFAULTS.seed, show_default=True, help="Of weights and batches.")
@click.option(
    "--data",
    default=STANDARD_LIBRARY,
    show_default=True,
    help="A text file or a folder of them, 'standard-library' (this Python's own sources) or 'synthetic'.",
)
@click.option(
    "--save",
    metavar="RUN",
    help="Write checkpoints into this run directory: at the end, and as --save-every says.",
)
@click.option("--save-every", type=_COUNT, metavar="K", help="Also save after every K-th step.")
@click.option(
    "--resume", is_flag=True, help="Go on from the newest checkpoint in --save, where there is one."
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="A folder for the record, or a file that ends in .json.  [default: zerokit-bench/]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the record on stdout, and nothing else there.")
@click.option(
    "--tracking-uri",
    help="Where MLflow keeps the run.  [default: MLFLOW_TRACKING_URI, else sqlite:///mlflow.db]",
)
@click.option("--experiment", default="zerokit-bench", show_default=True, help="Of MLflow.")
@click.option("--no-mlflow", is_flag=True, help="Write the record only.")
def command(
    output: Path | None,
    as_json: bool,
    tracking_uri: str | None,
    experiment: str,
    no_mlflow: bool,
    clip: float,
    **options: Any,
) -> None:
    """Train a model for some steps, measure it, write a record and an MLflow run.

    Tokens are the bytes of real text. A step's time is that of its slowest rank, warm-up apart. The record is
    JSON with every rank's every step; the MLflow run is filled from it after the ranks have ended.
    """
    from zerokit.bench.session import Tracking, record_path, run_session
    from zerokit.bench.tracking import resolve_uri
    from zerokit.cli.display import Display
    from zerokit.launch.interrupts import Interrupted, Interrupts
    from zerokit.launch.local import launch

    try:
        settings = Settings(clip=clip or None, **options)
    except UsageError as error:
        raise click.UsageError(str(error)) from error
    path = record_path(output, settings, datetime.now())
    tracking = None if no_mlflow else Tracking(resolve_uri(tracking_uri), experiment)
    display = Display()
    with Interrupts() as interrupts:

        def start(module: str, arguments: Sequence[str], *, log_dir: Path, poll: Callable[[], None]) -> None:
            launch(
                module,
                arguments,
                nodes=settings.nodes,
                nproc_per_node=settings.nproc_per_node,
                log_dir=log_dir,
                interrupts=interrupts,
                poll=poll,
            )

        with display:
            outcome = run_session(
                settings,
                path=path,
                tracking=tracking,
                launch=start,
                interrupted=interrupts.check,
                interruptions=(Interrupted, KeyboardInterrupt),
                phase=display.phase,
                show=display.show,
                warn=display.warn,
            )
    if as_json:
        click.echo(outcome.record.to_json(), nl=False)
    else:
        display.results(outcome.record)
    display.places(outcome, to_stderr=as_json)
