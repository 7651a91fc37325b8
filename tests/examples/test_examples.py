"""Every example runs on two ranks, one of them by torchrun as its head says, and what it prints holds."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import runpy
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import zerokit
from tests.cli.commands import FORKS, ROOT, torchrun
from tests.cli.elastic import copy_run
from tests.support.distributed import LIBRARIES, preload, run_ranks

EXAMPLES = ROOT / "examples"


def _run(folder: Path, name: str, *arguments: str, world: int = 2) -> str:
    """What all ranks print."""
    return "".join(run_ranks(world, _run_rank, str(folder), str(EXAMPLES / f"{name}.py"), arguments))


def _run_rank(folder: str, script: str, arguments: tuple[str, ...]) -> str:
    """The script, as it is, in a process whose process group is there already."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, GROUP_RANK="0", WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT="1", TORCHELASTIC_RUN_ID="test", HF_HUB_OFFLINE="1"
    )
    os.environ |= {"OMP_NUM_THREADS": "1", "MEMORY": str(Path(folder, "memory"))}
    for module in ("transformers", "lightning", "pytorch_lightning"):
        warnings.filterwarnings("ignore", module=module)
    warnings.filterwarnings("ignore", ".*(every=2 is too small|copies=2)")  # short steps, and one node
    os.chdir(folder)
    sys.argv = [script, *arguments]
    printed = io.StringIO()
    with (
        mock.patch.object(dist, "init_process_group"),
        mock.patch.object(dist, "destroy_process_group"),
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path(script, run_name="__main__")
    return printed.getvalue()


def _numbers(pattern: str, text: str) -> list[float]:
    """The numbers that the groups of `pattern` find, in the one place where it fits."""
    found = re.search(pattern, text)
    assert found is not None, f"{pattern!r} is not in:\n{text}"
    return [float(number) for number in found.groups()]


def test_plain_loop(tmp_path: Path) -> None:
    printed = _run(tmp_path, "plain_loop")
    losses = [float(loss) for loss in re.findall(r"loss (\S+),", printed)]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    assert "rate 0.00e+00" in printed
    assert "saved runs/plain_loop/step-00000020" in printed
    checkpoint = zerokit.Checkpoint(tmp_path / "runs/plain_loop")
    assert (checkpoint.step, checkpoint.world) == (20, 2)
    assert checkpoint.extra()["user"]["schedule"]["last_epoch"] == 20


def test_context_parallel(tmp_path: Path) -> None:
    """Two ranks a sequence, and two pairs of them with other sequences, train as one process on whole ones."""
    weights = []
    for world in (1, 2, 4):
        (tmp_path / str(world)).mkdir()
        printed = _run(tmp_path / str(world), "context_parallel", world=world)
        losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
        assert losses[-1] < losses[0]
        checkpoint = zerokit.Checkpoint(tmp_path / str(world) / "runs/context_parallel/run")
        names = [parameter.name for parameter in checkpoint.layout.parameters]
        weights.append({name: torch.from_numpy(checkpoint.read("master", name)) for name in names})
    for found in weights[1:]:
        for name, weight in weights[0].items():
            torch.testing.assert_close(found[name], weight, rtol=0.0, atol=1e-6)


@pytest.mark.full
def test_llama_on_meta(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    preload(LIBRARIES)
    printed = _run(tmp_path, "llama_meta")
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", printed)]
    assert losses[0] < math.log(256)
    assert losses[-1] < losses[0]
    held, whole = _numbers(r"holds (\d+) bytes of parameters in bf16; the model has (\d+)", printed)
    assert whole / 2 <= held < 0.52 * whole
    assert _numbers(r"differ by at most (\S+)", printed)[0] < 0.05
    weights = load_file(tmp_path / "runs/llama_meta/model/model.safetensors")
    assert weights["lm_head.weight"].dtype == torch.bfloat16


@pytest.mark.skipif(
    find_spec("lightning") is None and find_spec("pytorch_lightning") is None, reason="needs Lightning"
)
def test_lightning(tmp_path: Path) -> None:
    preload(LIBRARIES)
    printed = _run(tmp_path, "lightning_module")
    (first,) = _numbers(r"after 4 epochs: validated (\S+)", printed)
    (second,) = _numbers(r"after 6 epochs: validated (\S+)", printed)
    assert second < first
    assert "saved runs/lightning_module/best.ckpt; steps 48" in printed
    zerokit.verify(tmp_path / "runs/lightning_module/best.ckpt")


def test_lora(tmp_path: Path) -> None:
    printed = _run(tmp_path, "lora")
    first, last = _numbers(r"loss (\S+) -> (\S+)", printed)
    assert last < first
    trained, frozen = _numbers(r"(\d+) elements are trained, (\d+) are frozen", printed)
    assert trained == 4 * 2 * 4 * 128
    assert frozen == 4 * (128 * 128 + 128)
    assert _numbers(r"matrices that changed: (\d+), of them frozen: (\d+)", printed) == [8, 0]
    held, whole = _numbers(r"holds (\d+) bytes of the frozen base, which has (\d+)", printed)
    assert whole / 2 <= held < 0.52 * whole
    assert _numbers(r"and (\d+) bytes of masters", printed)[0] == pytest.approx(3 * 4 * trained / 2, rel=0.05)


def test_uneven_evaluation(tmp_path: Path) -> None:
    printed = _run(tmp_path, "uneven_evaluation")
    counts = [[int(n) for n in found] for found in re.findall(r"has (\d+) samples, (\d+) batches", printed)]
    assert sum(samples for samples, _ in counts) == 83
    assert counts[0][1] != counts[1][1], "this would be even"
    samples, mean = _numbers(r"mean error over (\d+) samples: (\S+)", printed)
    assert samples == 83
    assert _numbers(r"inside gathered\(\): (\S+)", printed)[0] == pytest.approx(mean, abs=2e-6)


@pytest.mark.full
def test_batches(tmp_path: Path) -> None:
    printed = _run(tmp_path, "batches")
    losses = [
        _numbers(rf"step {step}, epoch {step / 16:.2f}: loss ([\d.]+)", printed)[0] for step in (16, 32, 48)
    ]
    assert math.log(64) > losses[0] > losses[1] > losses[2]
    (tmp_path / "alone").mkdir()
    alone = _run(tmp_path / "alone", "batches", world=1)
    # The same samples, and the mean over the same tokens, on any number of ranks.
    assert alone.splitlines()[-1].split("loss")[1][:4] == printed.splitlines()[-1].split("loss")[1][:4]
    extra = zerokit.Checkpoint(tmp_path / "runs/batches/run").extra_plain()["user"]
    assert extra["batches"] == {"step": 48, "epoch": 3, "sample": 0, "seed": 0, "samples": 512}


def test_muon(tmp_path: Path) -> None:
    printed = _run(tmp_path, "muon")
    first, last, moved = _numbers(r"(?s)step 20: loss (\S+),.*step 60: loss (\S+), (\d+) bytes", printed)
    assert last < first < 2.0
    assert 0 < moved <= 4 * 4 * 2 * 64 * 256 / 2  # half of 8 matrices of 64 x 256 in fp32


def test_ema(tmp_path: Path) -> None:
    printed = _run(tmp_path, "ema")
    own, averaged, again = _numbers(
        r"validated: (\S+) with the weights, (\S+) .* average, (\S+) after", printed
    )
    assert averaged < own == again
    elements = 3 * (32 * 32 + 32)
    assert _numbers(r"takes (\d+) bytes", printed)[0] == pytest.approx(4 * elements / 2, rel=0.05)
    weights = load_file(tmp_path / "runs/ema/averaged/model.safetensors")
    checkpoint = zerokit.Checkpoint(tmp_path / "runs/ema/run")
    average = torch.as_tensor(checkpoint.read("ema", "0.0.weight"))
    assert torch.equal(weights["0.0.weight"].float(), average.to(weights["0.0.weight"].dtype).float())
    assert not torch.equal(average, torch.as_tensor(checkpoint.read("master", "0.0.weight")))


def test_local_steps(tmp_path: Path) -> None:
    printed = _run(tmp_path, "local_steps")
    islands = [
        _numbers(rf"island {island}: validated (\S+), (\S+) by itself, (\S+) together", printed)
        for island in range(2)
    ]
    assert islands[0][2] == islands[1][2] < islands[0][0]
    assert islands[0][1] != islands[1][1]
    moved, gradients = _numbers(r"moves (\d+) bytes .* would move (\d+)", printed)
    assert moved == gradients / 10
    elements = 4 * (32 * 32 + 32)
    assert _numbers(r"take (\d+) bytes", printed)[0] == pytest.approx(8 * elements / 2, rel=0.2)
    assert zerokit.list_steps(tmp_path / "runs/local_steps") == [60]


def test_resume(tmp_path: Path) -> None:
    printed = {2: _run(tmp_path, "resume")}
    printed |= {world: _run(tmp_path, "resume", "--resume", world=world) for world in (1, 3)}
    losses = {
        world: {int(step): float(loss) for step, loss in re.findall(r"step (\d+) on .*: loss (\S+)", text)}
        for world, text in printed.items()
    }
    assert list(losses[2]) == list(range(1, 9))
    for world in (1, 3):
        assert list(losses[world]) == list(range(5, 9))
        for step, loss in losses[world].items():
            assert loss == pytest.approx(losses[2][step], abs=2e-6)


def _steps(printed: str) -> list[tuple[int, int, int, int, str]]:
    """Step, ranks, first and last sample, and the loss with all its digits."""
    pattern = r"step (\d+) on (\d+) ranks: samples (\d+) to (\d+), loss (\S+)"
    return [(*map(int, found[:4]), found[4]) for found in re.findall(pattern, printed)]


def test_elastic_by_the_line_in_its_head(tmp_path: Path) -> None:
    folders = whole, killed, smaller, again = [
        tmp_path / name for name in ("whole", "killed", "smaller", "again")
    ]
    for folder in folders:
        folder.mkdir()
    script = str(EXAMPLES / "elastic.py")
    expected = _steps(_run(whole, "elastic"))
    assert [step[2:4] for step in expected] == [(8 * n, 8 * n + 7) for n in range(18)]

    # A killed worker: torchrun starts both anew, and after the repeated steps all is as if nothing had been.
    words = ("--standalone", "--nproc-per-node", "2", "--max-restarts", "1", script, "--kill")
    memory = killed / "memory"
    done = torchrun(killed, *FORKS, *words, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1", MEMORY=str(memory))
    assert done.returncode == 0, done.stderr
    # It resumes from the copy of step 6, which is newer than the run's step 5.
    assert _steps(done.stdout) == [*expected[:7], *expected[6:]]
    for folder in (whole, killed):
        zerokit.verify(folder / "runs/elastic")
        assert not (folder / "memory").exists()
    compared = zerokit.diff(whole / "runs/elastic", killed / "runs/elastic")
    # Generators are not drawn from here; numpy's begin anywhere in each process.
    assert [one for one in compared.differences if not one.name.startswith("rng")] == []
    assert compared.equal == 3 * 6

    # With one rank left, the next sample follows the last one that was saved.
    for folder in folders[2:]:
        copy_run(whole / "runs/elastic", folder / "runs/elastic", 5)
    rest = _steps(_run(smaller, "elastic", world=1))
    assert [step[:2] for step in rest] == [(step, 1) for step in range(6, 32)]
    assert [number for step in rest for number in range(step[2], step[3] + 1)] == list(range(40, 144))
    assert _steps(_run(again, "elastic", world=1)) == rest


def test_trainer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    preload(LIBRARIES)
    printed = _run(tmp_path, "trainer", "out")
    first, second = _numbers(r"loss (\S+) over the first 10 steps, (\S+) over the next 10", printed)
    assert second < 0.9 * first
    assert "loaded again: LlamaForCausalLM" in printed
    assert (tmp_path / "out/checkpoint-20/latest").is_file()


def test_sft_lora(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    printed = _run(tmp_path, "sft_lora", "sft")
    first, last = _numbers(r"loss (\S+) -> (\S+)", printed)
    assert last < first
    assert "the adapter in sft, loaded by PEFT, predicts the same: True" in printed
    assert (tmp_path / "sft/adapter_model.safetensors").is_file()


def test_each_is_tested_and_tells_how_to_run_it() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert scripts
    for script in scripts:
        assert f'"{script.stem}"' in tests or script.name in tests, script
        assert f"torchrun --nproc-per-node 2 examples/{script.name}" in script.read_text()
        assert len(script.read_text().splitlines()) <= 100, script
