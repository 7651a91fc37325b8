"""The models of plans, by name: the catalogue's, a factory, or a Hugging Face `config.json`.

And plans beside measurements: the plan of a measured cell, and a device's speed from a record.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from zerokit.bench.catalogue.engines import require_known
from zerokit.bench.catalogue.workloads import INSTALL, describe
from zerokit.bench.machine.host import write_first
from zerokit.bench.record.measured import Bandwidth, Planned
from zerokit.bench.record.options import ON_DEVICE
from zerokit.bench.record.record import Record
from zerokit.bench.record.schema import to_plain
from zerokit.bench.record.settings import Settings
from zerokit.bench.workloads.build import Loaded, load
from zerokit.documents import parse_json, read_text
from zerokit.errors import UsageError
from zerokit.placement import AnyPlacement, Mesh, Placement
from zerokit.planning.efficiency import SHARES, Efficiency, of_device
from zerokit.planning.hardware import Cluster, Device, Link, Reading, device_named
from zerokit.planning.measured import MeasuredStep, beside, measured_efficiency, measured_step
from zerokit.planning.memory import StepMemory, element_sizes
from zerokit.planning.replay import Step
from zerokit.planning.subject import Subject
from zerokit.planning.timeline import Plan as Timed
from zerokit.planning.timeline import step_time
from zerokit.planning.trace import UNBUILT, Traces, explained
from zerokit.runtime.precision import Precision

USUAL_TOKENS = 2048
"""Tokens a sequence where nobody says how many, or as many as the model has positions."""

USUAL_SIDE = 224
"""Pixels of an image's side where the model does not say."""


def subject_named(name: str, *, seq_len: int | None = None) -> Subject:
    """The subject of this name. Raises `UsageError` for a model that is unknown or cannot be built here.

    It is one of the catalogue, `package.module:factory`, whose factory returns an `Own`, or the path of a `config.json`
    that transformers reads. `seq_len` is for language models.
    """
    if name.endswith(".json"):
        return _from_config(Path(name), seq_len)
    workload = describe(name)
    if workload.config is None and seq_len is not None:
        raise UsageError(f"{name} makes its own batches: omit --seq-len {seq_len}, and set the length there")
    if workload.text is None:
        return subject_in(Settings(model=name))
    length = seq_len or min(USUAL_TOKENS, workload.text.positions)
    subject = subject_in(require_known(Settings(model=name, seq_len=length)))
    return replace(
        subject,
        bench_options=("--model", name, "--seq-len", str(length)),
        assumptions=() if seq_len else (f"Sequences of {length:,} tokens. Use --seq-len to change this.",),
    )


def subject_in(settings: Settings) -> Subject:
    """The subject that a bench with these settings trains; only the shapes of its data matter."""
    data = None if describe(settings.model).text is None else "synthetic"
    return subject_of(load(replace(settings, data=data, recompute=False)))


def subject_of(loaded: Loaded) -> Subject:
    """The subject of a loaded workload."""
    with explained(UNBUILT):
        model = loaded.model
    settings = replace(loaded.settings, recompute=False)

    def batch(samples: int) -> tuple[Tensor, ...]:
        return loaded.take(range(samples))

    build, options = replace(loaded, settings=settings).build, ("--model", settings.model)
    subject = Subject(settings.model, build, batch, model.unit, model.units_per_sample, bench_options=options)
    if model.flops_per_unit is None:  # then they are those of the traced step
        return subject
    return replace(
        subject, flops_per_unit=model.flops_per_unit, flops_convention=model.flops_convention or ""
    )


class OwnLoss(nn.Module):
    """A model of transformers with the loss that it computes itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """The loss, a scalar, of tokens or images and their labels."""
        main: Any = self.model.main_input_name
        loss: Tensor = self.model(**{main: inputs}, labels=labels).loss
        return loss


_TASKS = ("ImageClassification", "Seq2SeqLM", "MaskedLM", "CausalLM")
"""The suffixes of transformers' `AutoModelFor…` classes whose inputs and labels are known here."""


def _from_config(path: Path, seq_len: int | None) -> Subject:
    if importlib.util.find_spec("transformers") is None:
        raise UsageError(f"{path} needs transformers, which is not installed here; {INSTALL['transformers']}")
    content = _read_config(path)
    try:
        task, config = _configure(content)

        def build() -> nn.Module:
            return OwnLoss(task.from_config(config))

        with torch.device("meta"):
            name = type(build().model).__name__
    except Exception as error:  # whatever a library makes of somebody's file
        raise UsageError(
            f"{path}: transformers builds no model with a loss from it ({type(error).__name__}: "
            f"{str(error)[:200]}); give a factory, package.module:function, that builds the model with its loss"
        ) from error
    assumptions = [f"Trained as transformers' {name}, with its own loss."]
    if content.get("quantization_config"):
        assumptions.append("Weights are trained, so quantization_config is ignored.")
    if "ImageClassification" in task.__name__:
        if seq_len is not None:
            raise UsageError(f"{path} is an image model: omit --seq-len {seq_len}")
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", None) or USUAL_SIDE
        if getattr(vision, "image_size", None) is None:
            assumptions.append(f"Images of {USUAL_SIDE} x {USUAL_SIDE} pixels.")
        channels = getattr(vision, "num_channels", 3)
        shape = (channels, *(size if isinstance(size, list | tuple) else (size, size)))
        unit, length = "images", 1
    else:
        positions = _positions(config)
        length = seq_len or min(USUAL_TOKENS, positions or USUAL_TOKENS)
        if positions is not None and length > positions:
            raise UsageError(
                f"seq_len {length} exceeds the {positions} positions of {path}: give a smaller --seq-len"
            )
        shape, unit = (length,), "tokens"
        if seq_len is None:
            assumptions.append(f"Sequences of {length:,} tokens. Use --seq-len to change this.")

    def batch(samples: int) -> tuple[Tensor, ...]:
        if unit == "images":
            return torch.zeros(samples, *shape), torch.zeros(samples, dtype=torch.int64)
        tokens = torch.zeros(samples, *shape, dtype=torch.int64)
        return tokens, tokens

    return Subject(str(path), build, batch, unit, length, assumptions=tuple(assumptions))


def _positions(config: Any) -> int | None:
    """The longest sequence, of the text where the model has other parts; None where nothing limits it."""
    text = config.get_text_config()
    positions: int | None = getattr(text, "max_position_embeddings", None)
    if positions is None or positions < 1:
        return None
    # RoBERTa and its kin count positions from behind that of padding.
    behind = "roberta" in text.model_type or text.model_type in ("camembert", "longformer")
    return positions - text.pad_token_id - 1 if behind else positions


def _configure(content: dict[str, Any]) -> tuple[Any, Any]:
    """The class of transformers that makes the model, as the file names it if it does, and its configuration."""
    import transformers

    known = {
        key: value for key, value in content.items() if key not in ("model_type", "torch_dtype", "dtype")
    }
    config = transformers.AutoConfig.for_model(content["model_type"], **known | {"use_cache": False})
    made: dict[str, Any] = {}
    for task in _TASKS:
        auto: Any = getattr(transformers, f"AutoModelFor{task}")
        classes = auto._model_mapping.get(type(config), None) or ()
        made |= {one.__name__: auto for one in (classes if isinstance(classes, tuple) else (classes,))}
    named = content.get("architectures") or []
    if not made or any(name.rpartition("For")[1] and name not in made for name in named):
        raise ValueError(f"{', '.join(named) or content['model_type']} is not one of {', '.join(_TASKS)}")
    config.architectures = [next((name for name in named if name in made), next(iter(made)))]
    task = made[config.architectures[0]]
    if "Seq2Seq" in task.__name__ and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # any will do: shapes are the same
    return task, config


def _read_config(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(read_text(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not a model configuration: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("model_type"), str):
        raise UsageError(
            f"{path} is not a model configuration: it has no model_type, as transformers writes one"
        )
    return content


_PAGES = 1 << 12


class PlanBeside:
    """The plan of a cell that the bench measures, with the placement and precision of its optimizer.

    `device` is torch's name of a CUDA device, None for hosts; `traces` of the workload are made if there are none.
    """

    def __init__(
        self,
        settings: Settings,
        loaded: Loaded,
        placement: AnyPlacement,
        precision: Precision,
        device: str | None,
        traces: Traces | None = None,
    ) -> None:
        self._settings = settings
        self._timed: Timed | None = None
        name, on_cuda = settings.precision or "fp32", device is not None
        if settings.shares is not None or settings.pace:
            self.planned = Planned({}, {}, reason="the plan beside a bench has equal shares and batches")
            return
        if traces is None:
            traces = Traces(
                subject_of(loaded),
                on_cuda=on_cuda,
                bucket_mb=settings.bucket_mb,
                exactly=True,
                optimizer=settings.optimizer,
            )
        try:
            trace = traces.get(settings.batch_size, name, recompute=settings.recompute)
        except UsageError as error:
            self.planned = Planned({}, {}, reason=str(error))
            return
        mesh = placement.mesh
        layout = trace.layout.for_world(mesh.world)
        # On a host, the host is the device.
        home = ON_DEVICE if settings.home == "host" and not on_cuda else settings.home
        sizes = element_sizes(precision, settings.optimizer, layout, placement, home)
        step = Step(layout, placement, sizes, on_cuda, settings.nodes)
        memory = StepMemory(trace, step, accumulate=settings.accumulate).of(trace)
        self._timed = Timed(trace.work, step.layout, placement, sizes, micro_batches=settings.accumulate)
        step_ms: float | None = None
        reason: str | None = "a host's step is planned from its compute-only twin, and there is none"
        if device is not None:
            try:
                if home == "disk":
                    raise UsageError("how fast the disk of the states is, is not known")
                found = device_named(device)
                cluster = Cluster(found, settings.nproc_per_node, found.inner)
                step_ms = step_time(self._timed, cluster, of_device(found, name)).total_s * 1e3
                reason = None
            except UsageError as error:
                reason = str(error)
        self.planned = Planned(memory.peak, memory.highest, step_ms, reason)

    def with_time(self, record: Record) -> Planned:
        """On hosts also the step's time: from the twin's pace, and from single collectives of the same ranks."""
        twin, timed, environment = record.twin, self._timed, record.environment
        if twin is None or timed is None or environment is None or environment.accelerator is not None:
            return self.planned
        reading = _reading(record.bandwidth or (), record.settings.world)
        if timed.placement.mesh.outer > 1 or record.traffic is None or record.traffic.route != "memory":
            why = "hosts have planned steps where all ranks of a node read each other's memory"
        elif self._settings.optimizer != "adamw":
            why = "a host's step is planned for AdamW, whose update says how fast the host moves bytes"
        elif self._settings.states != ON_DEVICE:
            why = "a host's step is planned with states on the device"
        elif self._settings.precision != "fp32" or not twin.pace_ms or reading is None:
            why = "a host's step is planned in fp32, from a twin that computes the same"
        else:
            passes_s, step_s = median(twin.pace_ms) / 1e3, median(twin.step_ms) / 1e3
            measured = MeasuredStep(
                passes_s, step_s - passes_s, environment.threads, record.settings.world, fills_buckets=False
            )
            stepped = replace(timed, placement=Placement.of(twin.stage, timed.placement.mesh))
            efficiency = replace(measured_efficiency(measured, stepped, "fp32"), page_s=_page_seconds())
            link = Link(0.0, reading.gather, relays=False, reading=reading)
            cluster = Cluster(Device("cpu"), record.settings.world, link)
            time = step_time(timed, cluster, efficiency)
            return replace(self.planned, step_ms=time.total_s * 1e3, reason=None)
        return replace(self.planned, reason=why)


def speed_of(record: Record, cluster: Cluster, world: int) -> Efficiency:
    """The speed at which the record's own bench, once planned, takes as long as it took.

    On hosts it is that of a rank beside the others of its machine, if there are any.

    Raises `UsageError` for a record whose steps hold communication, that has no phases, or whose rank had other threads
    than the doctor's.
    """
    measured, device, sharing = measured_step(to_plain(record)), cluster.device, cluster.sharing
    if sharing is not None and sharing.threads != measured.threads:
        raise UsageError(
            f"the record's rank had {measured.threads} threads, the doctor's ranks had {sharing.threads}: repeat one "
            f"of them, such as OMP_NUM_THREADS={sharing.threads} zerokit bench --nproc-per-node 1"
        )
    settings = record.settings
    if settings.optimizer != "adamw":
        raise UsageError(
            f"the record's bench trained with {settings.optimizer}, and AdamW's update says how fast a device moves "
            "bytes: give a record of --optimizer adamw"
        )
    if settings.states != ON_DEVICE:
        raise UsageError(
            f"the update of the record's bench includes what --states {settings.states} costs, and it says how fast a "
            "device moves bytes: give a record with states on the device"
        )
    precision = settings.precision or "fp32"
    traces = Traces(
        subject_in(settings), on_cuda=bool(device.flops), bucket_mb=settings.bucket_mb, exactly=True
    )
    trace = traces.get(settings.batch_size, precision, recompute=settings.recompute)
    mesh = Mesh(1, measured.ranks)
    layout, placement = trace.layout.for_world(mesh.world), Placement.of(settings.stage, mesh)
    measured_plan = Timed(
        trace.work,
        layout,
        placement,
        element_sizes(Precision.of(precision), settings.optimizer, layout, placement),
        micro_batches=settings.accumulate,
    )
    nominal = of_device(device, precision, SHARES["h100-80"]) if device.flops else None
    efficiency = measured_efficiency(measured, measured_plan, precision, nominal, sharing)
    together = sharing is not None and world > 1 and measured.ranks == 1
    return beside(efficiency, sharing) if sharing is not None and together else efficiency


def _reading(bandwidths: Iterable[Bandwidth], world: int) -> Reading | None:
    """What zerokit's own collectives reached by themselves."""
    found = {
        one.operation: one.size_bytes * (world - 1) / world / one.ms * 1e3
        for one in bandwidths
        if one.by == "zerokit" and one.ms
    }
    gather, reduce = found.get("all_gather"), found.get("reduce_scatter")
    return None if gather is None or reduce is None else Reading(gather, gather, reduce)


def _page_seconds() -> float:
    """What the first write to a page of memory costs on this host."""
    times = []
    for _ in range(9):
        start = perf_counter()
        write_first(_PAGES)
        times.append(perf_counter() - start)
    return median(times) / _PAGES
