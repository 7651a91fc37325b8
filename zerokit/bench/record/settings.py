"""The settings of a bench, made by the command line, used by ranks and kept in the record.

A new option is one field of `Settings`, written with `option`: its type, default, help, choices and limits, whether it
makes sweeps, and its words in tables. `zerokit bench --help`, sweep files, completion, checks, cells, labels, MLflow's
parameters and the record follow from the field; only what obeys the option is written elsewhere. To let an option take
one more value, add it to `choices`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType

from zerokit.bench.record.by_rank import (
    PACE_EVERY,
    contradictions_of_unequal,
    parse_cores,
    parse_mesh,
    parse_sizes,
)
from zerokit.bench.record.options import (
    LOSSY_WIRES,
    ON_DEVICE,
    STAGES,
    STEPS_A_ROUND,
    Option,
    fixed,
    inner,
    outer,
    saved,
    timed,
)
from zerokit.bench.record.schema import Integer, Number
from zerokit.errors import UsageError


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of one bench, explained in their help.

    `precision`, `device`, `bucket_mb`, `data`, `image_size` and `warmup` are None until a rank has looked at its
    machine and its model; the record has the resolved values. `clip` None leaves gradients alone, and their norm
    unmeasured. `repeat` numbers equal cells of a sweep.

    Raises `UsageError` for values that contradict each other; `bench.catalogue.engines` knows engines and models.
    """

    engine: str = inner("zerokit", "Training engines: {engines}.", metavar="NAME")
    model: str = outer(
        "gpt-5m",
        "Workloads: {models}; or package.module:factory for your own, which returns a zerokit.bench.workloads.own.Own.",
        metavar="NAME",
        words="{}",
    )
    stage: Integer = inner(
        2,
        "ZeRO stage: 0 shards nothing, 1 optimizer states, 2 also gradients, 3 also parameters.",
        choices=STAGES,
        shown_default="each engine's own, zerokit's is 2",
    )
    mesh: str | None = inner(
        None,
        "A mesh of two axes: M groups (such as nodes) of S ranks. --stage then belongs to the inner axis. For "
        "zerokit and fsdp2.",
        metavar="MxS",
    )
    outer_stage: Integer | None = inner(
        None,
        "ZeRO stage of the mesh's outer axis, at most --stage; 0 with --stage 3 is HSDP.",
        choices=STAGES,
        shown_default="--stage",
    )
    optimizer: str = inner(
        "adamw",
        "adamw, or muon: torch's Muon on the matrices of the blocks, AdamW on all else (embeddings, heads, norms, "
        "biases).",
        choices=("adamw", "muon"),
        words="{}",
    )
    states: str = inner(
        "device",
        "Where masters and the optimizer's states are between steps: device, host, fp8 (moments in eight bits on the "
        "device), or the path of a directory on a disk of each node. For zerokit.",
        metavar="NAME|PATH",
        words="states {}",
    )
    shares: str | None = fixed(
        None,
        "Shares of what is sharded: by rank, by rank of the mesh's inner axis, or by free memory. For zerokit.",
        metavar="N,N,…|memory",
        shown_default="equal",
        words="shares {}",
    )
    every: Integer | None = inner(
        None,
        "Local steps: islands (the groups of --mesh, or else single ranks) train alone and synchronise their "
        "weights every N steps. For zerokit (DiLoCo) and post-local-sgd (torch's mean of the weights).",
        minimum=1,
        title="local steps",
        words="every {} steps",
    )
    fragments: Integer = inner(
        1, "Parts of the model that islands synchronise in turn (--every).", minimum=1, words="{} fragments"
    )
    delay: Integer = inner(
        0,
        "Steps for which a fragment is in flight while training continues (--every).",
        minimum=0,
        words="delay {}",
    )
    precision: str | None = outer(
        None,
        "Compute dtype: fp32, bf16 or fp16.",
        choices=("fp32", "bf16", "fp16"),
        shown_default="bf16 on CUDA, fp32 on a CPU",
        words="{}",
    )
    wire: str = inner(
        "own",
        "Dtype of gradients between ranks: own is the engine's; bf16 (ddp with torch's hook; zerokit sums in "
        "fp32); int8 and int4, rounded at random (zerokit), and powersgd (ddp with torch's hook) change the "
        "mathematics. With "
        "--every, int8 and int4 are the wire of the weights between islands.",
        choices=("own", "bf16", *LOSSY_WIRES),
        words="{} wire",
    )
    nodes: Integer = outer(
        1,
        "Number of nodes, simulated on this machine unless --launcher is given.",
        minimum=1,
        shown_default="all of the launcher's, or 1",
        words="{} nodes",
    )
    nproc_per_node: Integer = outer(
        1,
        "Ranks on each node.",
        minimum=1,
        shown_default="its visible CUDA devices; 1 on a CPU",
        title="ranks a node",
        words="{} ranks a node",
    )
    batch_size: Integer = outer(
        4, "Samples (sequences, images) in a micro-batch on one rank.", minimum=1, words="batch {}"
    )
    seq_len: Integer = outer(
        128,
        "Tokens in a sequence of a language model.",
        minimum=1,
        shown_default="128, or the model's number of positions if lower",
        title="tokens a sequence",
        words="{} positions",
    )
    accumulate: Integer = outer(1, "Micro-batches in a step.", minimum=1, words="{} micro-batches")
    recompute: bool = fixed(
        False,
        "Recompute blocks (the children of the model's ModuleLists) in backward instead of keeping their activations.",
    )
    pace: bool = fixed(
        False,
        f"Deal the samples of a step to ranks by their speed, agreed on every {PACE_EVERY} steps. For zerokit.",
        words="by pace",
    )
    cores_per_rank: str | None = fixed(
        None,
        "Hold ranks on this machine to so many processor cores each, such as 1,0.5. Needs the right to make control "
        "groups.",
        metavar="X,X,…",
        words="cores {}",
    )
    memory_per_rank: str | None = fixed(
        None,
        "Hold ranks on this machine to so much memory each, such as 2G,1G.",
        metavar="SIZE,…",
        words="memory {}",
    )
    bucket_mb: Number | None = inner(
        None,
        "Largest unit of neighbouring small modules, in MiB of fp32.",
        above=0,
        shown_default="the engine's",
        title="bucket, MiB",
        words="bucket {:g} MiB",
    )
    device: str | None = fixed(
        None, "Device of the ranks.", choices=("cpu", "cuda"), shown_default="cuda if available"
    )
    image_size: Integer | None = fixed(
        None, "Pixels on each side of an image model's input.", minimum=1, shown_default="the model's"
    )
    lr: Number = fixed(
        1e-3,
        "Learning rate of AdamW, and of Muon, whose updates are scaled to the size of AdamW's.",
        minimum=0,
        title="learning rate",
    )
    clip: Number | None = fixed(
        1.0, "Largest gradient norm; 0 turns off clipping and the measurement of the norm.", minimum=0
    )
    seed: Integer = fixed(0, "Seed for weights and batches.")
    data: str | None = fixed(
        None,
        "A file or a folder, 'standard-library' (the text of this Python's own sources) or 'synthetic'.",
        metavar="PATH",
        shown_default="standard-library for language models, else synthetic",
    )
    steps: Integer = timed(
        30,
        "Number of measured steps.",
        minimum=1,
        shown_default=f"30; {STEPS_A_ROUND} in each of several rounds",
    )
    warmup: Integer | None = timed(
        None, "Number of warm-up steps.", minimum=0, shown_default="until step times are steady"
    )
    target_loss: Number | None = timed(
        None,
        "Also report the number of tokens (samples, images) after which the mean loss of five steps reaches X.",
        above=0,
        title="target loss",
    )
    twin: bool = timed(
        True,
        "Also train each cell without communication, alternating with it. The difference is the cost of "
        "communication.",
    )
    save: str | None = saved(
        None,
        "Write a checkpoint into this run directory at the end, and every --save-every steps. The command fails before "
        "training if the directory already holds later steps.",
        metavar="RUN",
    )
    save_every: Integer | None = saved(None, "Also save every K steps.", minimum=1, metavar="K")
    background: bool = saved(
        False, "Save in the background while the next steps run; their times include it.", same_cell=False
    )
    resume: bool = saved(False, "Continue from the newest checkpoint in --save, if there is one.")
    elastic: bool = saved(
        False,
        "Continue from --save with the ranks that remain when others are killed, and with more when nodes join. "
        "zerokit restarts ranks on this machine; elsewhere torchrun does. The run ends at step --steps, and "
        "--save-every defaults to a tenth of that. One record covers all parts. Implies --no-twin.",
    )
    copies: Integer | None = saved(
        None,
        "Also copy the training state into the memory of K nodes, its own included, beside the steps of an elastic "
        "bench. A restart then resumes from memory. --save-every can be seldom.",
        minimum=1,
        metavar="K",
        same_cell=False,
    )
    copy_every: Integer = saved(
        10, "Copy every N steps; a restart repeats at most these (--copies).", minimum=1, same_cell=False
    )
    copy_to: str = saved(
        "/dev/shm",
        "A directory of each node's own, in which the job makes one for its copies, and removes it at its end.",
        metavar="DIR",
        same_cell=False,
    )
    repeat: Integer = 0

    def __post_init__(self) -> None:
        for name, how in OPTIONS.items():
            value = getattr(self, name)
            if value is None:
                continue
            if value == "":  # a variable of a script that is not set
                raise UsageError(f"{name} is empty: give a value, or leave the option out")
            if how.choices and value not in how.choices:
                raise UsageError(f"{name} {value!r} is unknown: choose one of {how.choices}")
            if how.minimum is not None and value < how.minimum:
                raise UsageError(f"{name} must be at least {how.minimum}, not {value}")
            if how.above is not None and value <= how.above:
                raise UsageError(f"{name} must be above {how.above}, not {value}")
        if self.clip == 0:
            object.__setattr__(self, "clip", None)
        if (contradiction := next(self._contradictions(), None)) is not None:
            raise UsageError(contradiction)

    def _contradictions(self) -> Iterator[str]:
        if self.states not in (ON_DEVICE, "host", "fp8") and "/" not in self.states:
            yield (
                f"states {self.states!r}: expected device, host, fp8, or the path of a directory with a slash, such as "
                f"./{self.states}"
            )
        yield from contradictions_of_unequal(
            *(self.shares, self.world, self.shape and self.shape[1]),
            pace=self.pace,
            limited=bool(self.cores or self.memory_bytes),
            islands=self.every is not None,
            elastic=self.elastic,
            warmup=self.warmup,
        )
        if self.every is None and (self.fragments != 1 or self.delay):
            yield "--fragments and --delay belong to local steps: give --every too"
        if self.every is not None:
            if self.outer_stage is not None:
                yield "--every synchronises over the outer axis itself: omit --outer-stage"
            if self.world == 1:
                yield "--every needs islands to synchronise: give at least 2 ranks"
            if self.delay >= self.every:
                yield f"--delay {self.delay} must be under --every {self.every}"
            if self.fragments > self.every:
                yield f"--fragments {self.fragments} must be at most --every {self.every}"
        if self.mesh is None and self.outer_stage is not None:
            yield "--outer-stage is the stage of a mesh's outer axis: give --mesh, such as 2x4, too"
        if self.mesh is not None:
            outer, inner = parse_mesh(self.mesh)
            islands = self.every is not None and outer > 1
            if outer * inner != self.world or (1 in (outer, inner) and not islands):
                yield (
                    f"mesh {self.mesh} has {outer * inner} ranks, and there are {self.world}: the product of its axes "
                    "must be the number of ranks, and neither axis 1"
                )
            if self.outer_stage is not None and self.outer_stage > self.stage:
                yield f"outer stage {self.outer_stage} with stage {self.stage}: it lies between 0 and the inner one"
            if self.elastic and not (islands and outer == self.nodes):
                yield (
                    "an elastic bench changes the number of ranks, which a mesh fixes: leave --mesh out, or let each "
                    "node be an island (--mesh NODESxRANKS with --every)"
                )
        if self.save is None and (self.resume or self.save_every is not None or self.background):
            yield "save_every, background and resume need a run directory: give --save as well"
        if self.elastic and self.save is None:
            yield "an elastic bench resumes from its checkpoints: give a run directory with --save"
        if self.copies is not None and not self.elastic:
            yield "--copies are for an elastic bench, which resumes from them: give --elastic as well"
        if self.copies is not None and self.every is not None:
            yield "--copies and --every: islands have no copies, each of them is one of the whole model already"
        if self.copies is None and (self.copy_every, self.copy_to) != (10, "/dev/shm"):
            yield "--copy-every and --copy-to belong to copies: give --copies K, such as 2, too"
        if self.save is not None and self.engine != "zerokit":
            yield f"--save writes zerokit's checkpoints, which engine {self.engine!r} cannot"

    @property
    def cores(self) -> tuple[float, ...] | None:
        """The cores that each rank is held to."""
        return None if self.cores_per_rank is None else parse_cores(self.cores_per_rank, self.world)

    @property
    def memory_bytes(self) -> tuple[int, ...] | None:
        """The memory that each rank is held to."""
        return None if self.memory_per_rank is None else parse_sizes(self.memory_per_rank, self.world)

    @property
    def home(self) -> str:
        """The kind of home of `states` (`zerokit.sizes.HOMES`)."""
        return "disk" if "/" in self.states else self.states

    @property
    def shape(self) -> tuple[int, int] | None:
        """The mesh, (outer, inner)."""
        return None if self.mesh is None else parse_mesh(self.mesh)

    @property
    def islands(self) -> tuple[int, int]:
        """With local steps, the number of islands and the ranks of each."""
        return self.shape or (self.world, 1)

    @property
    def stages(self) -> tuple[int, int]:
        """The stages of the outer and the inner axis."""
        return self.stage if self.outer_stage is None else self.outer_stage, self.stage

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.nodes * self.nproc_per_node

    @property
    def samples_per_step(self) -> int:
        """Sequences or images in a step, over all ranks and micro-batches."""
        return self.world * self.batch_size * self.accumulate

    @property
    def saves_every(self) -> int | None:
        """The number of steps between checkpoints; None for one at the end only."""
        if self.elastic and self.save_every is None:
            return max(1, self.steps // 10)  # a restart repeats a tenth of the run at most
        return self.save_every

    @property
    def key(self) -> str:
        """A digest that is equal for equal settings in any process; an interrupted sweep finds its cells by it."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


OPTIONS: Mapping[str, Option] = MappingProxyType(
    {one.name: one.metadata["option"] for one in fields(Settings) if "option" in one.metadata}
)
"""The options of a cell by the names of their fields, in the order of the help."""

DIMENSIONS = tuple(
    name for place in ("outer", "inner") for name, how in OPTIONS.items() if how.sweep == place
)
"""Options that may take several values, the slowest to change first."""
