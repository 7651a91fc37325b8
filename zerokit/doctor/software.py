"""Versions of the software in training, and whether all ranks have the same."""

from __future__ import annotations

import platform
import re
import sys
from dataclasses import dataclass, fields

from zerokit import __version__
from zerokit.bench.machine.host import torch_built
from zerokit.doctor.findings import Answers, Verdict, fault, ok, warning
from zerokit.versions import installed, program

OLDEST_TORCH = (2, 6)
"""As in pyproject.toml."""

# Ranks with different ones of these cannot work together, or silently compute different things.
_MUST_AGREE = ("zerokit", "program", "torch", "cuda", "nccl")


@dataclass(frozen=True, slots=True)
class Software:
    """Versions; None for packages that are not installed, and for parts that this torch lacks.

    `program` is a hash of zerokit's own files, which may differ under one version.
    """

    python: str
    zerokit: str
    program: str
    torch: str | None
    cuda: str | None
    nccl: str | None
    safetensors: str | None
    mlflow: str | None


def look_at_software() -> Software:
    """This process's versions, by the installed packages' metadata: torch is used only if already imported."""
    torch, cuda = torch_built()
    return Software(
        python=platform.python_version(),
        zerokit=__version__,
        program=program(),
        torch=torch or installed("torch"),
        cuda=cuda,
        nccl=_nccl(),
        safetensors=installed("safetensors"),
        mlflow=installed("mlflow") or installed("mlflow-skinny"),
    )


def _nccl() -> str | None:
    """As torch links it, where torch is imported; else that of its package."""
    if (torch := sys.modules.get("torch")) is not None:
        if torch.version.cuda is None or not torch.distributed.is_nccl_available():
            return None
        return ".".join(map(str, torch.cuda.nccl.version()))
    found = (installed(f"nvidia-nccl-cu{cuda}") for cuda in (13, 12, 11))
    return next(filter(None, found), None)


def judge_software(software: Software) -> Verdict:
    """ZD101."""
    listed = _listed(software)
    missing = [name for name in ("torch", "safetensors") if getattr(software, name) is None]
    if missing:
        return fault(
            f"{listed}; {' and '.join(missing)} not installed",
            "zerokit requires these packages.",
            f"pip install {' '.join(missing)}",
        )
    if _numbers(software.torch or "") < OLDEST_TORCH:
        needed = ".".join(map(str, OLDEST_TORCH))
        return fault(
            f"torch {software.torch}",
            f"zerokit needs torch {needed} or later.",
            f"install torch {needed} or later",
        )
    if software.mlflow is None:
        return warning(
            f"{listed}; mlflow not installed",
            "Benches keep their records, but write no MLflow runs.",
            "pip install mlflow, or use --no-mlflow",
        )
    return ok(listed)


def _listed(software: Software) -> str:
    pairs = ((field.name, getattr(software, field.name)) for field in fields(software))
    return ", ".join(f"{_NAMES.get(name, name)} {value}" for name, value in pairs if value is not None)


_NAMES = {
    "python": "Python",
    "program": "zerokit's files",
    "cuda": "CUDA",
    "nccl": "NCCL",
    "mlflow": "MLflow",
}


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def judge_agreement(answers: Answers[Software]) -> Verdict | None:
    """ZD102."""
    if len(answers) < 2:
        return None
    differing: dict[str, str] = {}
    for field in fields(Software):
        versions: dict[str, list[int]] = {}
        for seat, software in answers:
            versions.setdefault(getattr(software, field.name) or "none", []).append(seat.rank)
        if len(versions) > 1:
            differing[field.name] = ", ".join(
                f"{version} on rank {', '.join(map(str, ranks))}" for version, ranks in versions.items()
            )
    if not differing:
        return ok(f"all {len(answers)} ranks have the same versions")
    listed = "; ".join(f"{_NAMES.get(name, name)}: {versions}" for name, versions in differing.items())
    verdict, meaning = warning, "Results or files may differ in details between ranks."
    if any(name in differing for name in _MUST_AGREE):
        verdict = fault
        meaning = (
            "Ranks with different versions of zerokit, torch, CUDA or NCCL fail to meet, or compute different "
            "results."
        )
    remedy = "install the same versions on every node, for instance with pip's --constraint constraints.txt"
    return verdict(listed, meaning, remedy)
