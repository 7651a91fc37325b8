"""examples/trainer.py, as its first lines say to run it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from tests.cli.commands import ROOT, environment


def test_the_trainer_example(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *(
                "--rdzv-backend",
                "c10d",
                "--rdzv-endpoint",
                "localhost:0",
            ),  # a free port; the default one may be taken
            *(str(ROOT / "examples/trainer.py"), "out"),
        ],
        cwd=tmp_path,
        env=environment(tmp_path, OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = re.search(r"loss (\S+) over the first 10 steps, (\S+) over the next 10", done.stdout)
    assert losses is not None, done.stdout
    assert float(losses[2]) < 0.9 * float(losses[1])
    assert "loaded again: LlamaForCausalLM" in done.stdout
    assert (tmp_path / "out/checkpoint-20/latest").is_file()
