"""What the record says of machine and software."""

from __future__ import annotations

import subprocess
from pathlib import Path

from zerokit.bench.measure.environment import git_commit, measured_variables


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_the_commit_of_a_repository_and_whether_it_was_changed(tmp_path: Path) -> None:
    assert git_commit(tmp_path) is git_commit(tmp_path / "missing") is None
    git(tmp_path, "init", "--quiet")
    assert git_commit(tmp_path) is None  # nothing is committed yet
    (tmp_path / "file").write_text("one")
    git(tmp_path, "add", "file")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "record.json").write_text("not tracked: no change")
    assert git_commit(tmp_path) == commit
    (tmp_path / "file").write_text("two")
    assert git_commit(tmp_path / ".") == f"{commit}-dirty"


def test_only_variables_that_change_measurements_are_kept_without_their_secrets() -> None:
    kept = {"GLOO_SOCKET_IFNAME": "lo", "LD_PRELOAD": "libjemalloc.so", "MALLOC_ARENA_MAX": "2"}
    kept |= {
        "NCCL_ALGO": "Ring",
        "OMP_NUM_THREADS": "1",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    }
    kept |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    others = {"HOME": "/root", "AWS_SECRET_ACCESS_KEY": "x", "CUDA_HOME": "/usr/local/cuda", "PATH": "/bin"}
    secret = {"NCCL_HTTP_TOKEN": "hunter2", "NCCL_PROXY": "http://bob:hunter2@proxy:1"}
    hidden = {"NCCL_HTTP_TOKEN": "***", "NCCL_PROXY": "http://***@proxy:1"}
    assert measured_variables(kept | others | secret) == kept | hidden
