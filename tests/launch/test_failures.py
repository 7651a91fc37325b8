"""What a rank's stderr says of its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from zerokit.launch.failures import last_error, says_peer_lost


@pytest.mark.parametrize(
    ("log", "error"),
    [
        ("Traceback:\n  raise ValueError\nValueError: no luck\n", "ValueError: no luck"),
        (
            "[rank1]: torch.OutOfMemoryError: CUDA out of memory\n",
            "torch.OutOfMemoryError: CUDA out of memory",
        ),
        ("KeyError: 1\n\nDuring handling\nRuntimeError: 2\nframe #1: at\n", "RuntimeError: 2"),
        (
            "json.decoder.JSONDecodeError: Expecting value\nbye\n",
            "json.decoder.JSONDecodeError: Expecting value",
        ),
        ("KeyboardInterrupt\n", "KeyboardInterrupt"),
        ("Errors: 3\nstep 1: ok\n", ""),
        ("", ""),
    ],
)
def test_the_last_error_of_a_log(tmp_path: Path, log: str, error: str) -> None:
    (tmp_path / "stderr.log").write_text(log)
    assert last_error(tmp_path / "stderr.log") == error


def test_errors_of_ranks_that_lost_another_follow_its_end() -> None:
    gloo = "RuntimeError: [pair.cc:534] Connection closed by peer [127.0.0.1]:1234"
    assert says_peer_lost(gloo)
    assert says_peer_lost("DistBackendError: NCCL error: remote process exited or there was a network error")
    assert not says_peer_lost("ValueError: no luck")
