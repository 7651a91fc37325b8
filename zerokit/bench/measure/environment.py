"""The environment that a record keeps: machine, software, and variables that affect measurements."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import zerokit
from zerokit.bench.machine.host import cores, memory_bytes, processor_name
from zerokit.bench.record.measured import Environment
from zerokit.text import without_secrets_named
from zerokit.versions import installed

if TYPE_CHECKING:
    from zerokit.bench.machine.accelerator import Accelerator

# Packages that can take part in a step, beside torch; named in the record where a rank has imported them.
_PACKAGES = ("deepspeed", "torchvision", "transformers", "triton")
# Allocators, communication, threads, and how kernels are launched and chosen.
_VARIABLE = re.compile(
    r"(GLOO|GOMP|KMP|MALLOC|MKL|NCCL|OMP|TORCH_NCCL)_.*"
    r"|(GLIBC_TUNABLES|PYTORCH_(CUDA_)?ALLOC_CONF|PYTORCH_NO_CUDA_MEMORY_CACHING|TORCH_DISTRIBUTED_DEBUG).*"
    r"|CUBLAS_WORKSPACE_CONFIG|CUDA_(DEVICE_MAX_CONNECTIONS|LAUNCH_BLOCKING|MODULE_LOADING)|DS_ACCELERATOR"
    r"|LD_PRELOAD|NVIDIA_TF32_OVERRIDE|TORCH_ALLOW_TF32_CUBLAS_OVERRIDE|ZEROKIT_CMA"
)
_GIT_SECONDS = 10.0


def look_around(accelerator: Accelerator) -> Environment:
    """The environment of this rank, inside its process group. It starts `git`, so do not call it in a timed step."""
    import torch
    import torch.distributed as dist

    on_cuda = accelerator.is_cuda
    return Environment(
        zerokit=zerokit.__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        platform=platform.platform(),
        processor=processor_name(),
        cores=cores(),
        memory_bytes=memory_bytes(),
        threads=torch.get_num_threads(),
        backend=accelerator.backend,
        world=dist.get_world_size(),
        accelerator=torch.cuda.get_device_name(accelerator.device) if on_cuda else None,
        accelerators=torch.cuda.device_count() if on_cuda else 0,
        cuda=torch.version.cuda if on_cuda else None,
        nccl=".".join(map(str, torch.cuda.nccl.version())) if accelerator.backend == "nccl" else None,
        # What is imported may be on the path, but not installed.
        packages={name: installed(name) or "unknown" for name in _PACKAGES if name in sys.modules},
        variables=measured_variables(os.environ),
        git_commit=git_commit(Path.cwd()),
    )


def measured_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that affect measurements, by name, without passwords and tokens."""
    return {
        name: without_secrets_named(name, value)
        for name, value in sorted(environment.items())
        if _VARIABLE.fullmatch(name)
    }


def git_commit(folder: Path) -> str | None:
    """The commit checked out at `folder`, with "-dirty" if tracked files have uncommitted changes.

    None outside a repository, and where there is no git.
    """
    describe = "describe --always --exclude=* --abbrev=64 --dirty"  # 64 digits at most: all there are
    # A repository's own configuration may name a program that watches its files.
    command = [
        "git",
        "-c",
        "core.fsmonitor=false",
        "--no-optional-locks",
        "-C",
        str(folder),
        *describe.split(),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
