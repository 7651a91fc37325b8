"""The worker as a process of its own, in the environment that torchrun gives it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.commands import environment
from zerokit.bench.record.record import read_record
from zerokit.bench.record.schema import to_plain
from zerokit.bench.record.settings import Settings
from zerokit.bench.worker.rank import require_ranks
from zerokit.errors import UsageError
from zerokit.network import free_port

TINY = Settings(model="gpt-tiny", seq_len=16, batch_size=2, steps=2, warmup=1, data="synthetic")
WITHOUT_ZLIB_NG = "import sys; sys.modules['zlib_ng'] = None"


def work(folder: Path, settings: Settings, before: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the only rank of a job, whose record goes to `folder`/record.json; `before` is Python that runs first."""
    job = folder / "job.json"
    job.write_text(json.dumps({"settings": to_plain(settings), "record": str(folder / "record.json")}))
    torchrun = {
        **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0"),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS"), "1"),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
        **variables,
    }
    main = f"from pathlib import Path; from zerokit.bench.worker.rank import main; main(Path({str(job)!r}))"
    return subprocess.run(
        [sys.executable, "-c", f"{before}\n{main}"],
        cwd=folder,
        env=environment(folder, **torchrun),
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


@pytest.mark.parametrize("started", [("8", "2"), ("4", "4"), (None, "2")])
def test_the_launchers_world_is_that_of_the_settings(started: tuple[str | None, str]) -> None:
    settings = replace(TINY, nodes=2, nproc_per_node=2)
    require_ranks(settings, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})
    variables = dict(zip(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), started, strict=True))
    with pytest.raises(UsageError, match=r"but the job's settings ask for 2 nodes × 2 ranks"):
        require_ranks(settings, {name: value for name, value in variables.items() if value is not None})


def test_with_checkpoints_it_is_missed_before_a_step_is_trained(tmp_path: Path) -> None:
    done = work(tmp_path, replace(TINY, save="run"), WITHOUT_ZLIB_NG)
    assert done.returncode == 1
    assert "UsageError: --save needs zlib-ng, which is not installed here: pip install zlib-ng" in done.stderr
    assert not (tmp_path / "record.json").exists()


# Any wait of the host for the device between two measured steps is an error.
NO_WAITING = """
import torch
from zerokit.bench.measure.clock import DeviceClock
begin, read = DeviceClock.begin, DeviceClock.read
def strict_begin(self):
    begin(self)
    torch.cuda.set_sync_debug_mode("error")
def strict_read(self):
    torch.cuda.set_sync_debug_mode("default")
    return read(self)
DeviceClock.begin, DeviceClock.read = strict_begin, strict_read
"""


@pytest.mark.gpu
def test_on_cuda_the_host_does_not_wait_and_the_clocks_agree(tmp_path: Path) -> None:
    """The twin, since it is the floor; an engine may have waits of its own."""
    settings = replace(TINY, model="gpt-34m", seq_len=128, batch_size=4, steps=20, device="cuda")
    settings = replace(settings, engine="compute-only", stage=0)
    done = work(tmp_path, settings, NO_WAITING)
    assert done.returncode == 0, done.stderr
    record = read_record(tmp_path / "record.json")
    (one,) = record.ranks
    assert one.window_ms == pytest.approx(sum(one.step_ms), rel=0.1)
    assert len(record.loss) == len(record.gradient_norm) == 21
    assert one.device_memory is not None
    assert one.device_memory.batch_bytes == 20 * 2 * 4 * 128 * 8
    assert one.peak_reserved_bytes is not None
    assert one.device_memory.total_bytes > one.device_memory.used_bytes >= one.peak_reserved_bytes
    assert one.device_id is not None
    assert one.device_id.startswith(("GPU-", "MIG-"))
    assert record.results is not None
    assert record.results.devices == 1
    assert record.results.throughput_per_device == record.results.throughput


@pytest.mark.gpu
@pytest.mark.parametrize("stage", [0, 3])
def test_on_cuda_zerokits_losses_do_not_depend_on_when_they_are_read(tmp_path: Path, stage: int) -> None:
    """A loss or a norm that a later step wrote over would be that step's."""
    by_step = "from zerokit.bench.measure.clock import DeviceClock; DeviceClock.runs_ahead = False"
    found = []
    for name, before in (("ahead", ""), ("by-step", by_step)):
        (tmp_path / name).mkdir()
        settings = replace(TINY, stage=stage, steps=6, device="cuda", precision="fp32")
        done = work(tmp_path / name, settings, before, CUBLAS_WORKSPACE_CONFIG=":4096:8")
        assert done.returncode == 0, done.stderr
        record = read_record(tmp_path / name / "record.json")
        found.append((record.loss, record.gradient_norm))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-5)
    assert found[0][1] == pytest.approx(found[1][1], rel=1e-4)
    assert len(set(found[0][0])) == 7


def test_without_checkpoints_a_bench_runs_without_zlib_ng_and_memory_that_ends_late_costs_no_record(
    tmp_path: Path,
) -> None:
    """A cell that fills its device has no room for the buffers of collectives by themselves."""
    before = f"""
{WITHOUT_ZLIB_NG}
import zerokit.cli.bench, zerokit.launch.local  # the launcher
import torch, zerokit.bench.worker.rank as rank
def no_room(*arguments):
    raise torch.OutOfMemoryError("no room")
rank.measure_bandwidth = no_room
"""
    done = work(tmp_path, TINY, before)
    assert "OutOfMemory: out of memory: gpt-tiny" in done.stderr
    record = read_record(tmp_path / "record.json")
    assert (record.status, len(record.ranks[0].step_ms)) == ("ok", TINY.steps)
    assert record.phases is not None
    assert record.ranks[0].memory_bytes is not None
