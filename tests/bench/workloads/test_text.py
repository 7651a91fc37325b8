"""Sample i depends on (seed, i) alone; bad text is refused in plain words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zerokit.bench.workloads.build import draw_seed, sample_text
from zerokit.bench.workloads.inputs import (
    STANDARD_LIBRARY,
    SYNTHETIC,
    Corpus,
    DataError,
    load_corpus,
    require_length,
)


def batch(
    corpus: Corpus, *, seed: int = 1, first: int = 2, batch_size: int = 4, length: int = 16
) -> list[torch.Tensor]:
    sample = sample_text(corpus, length)
    samples = [sample(draw_seed(seed=seed, sample=first + number)) for number in range(batch_size)]
    return [torch.stack(parts) for parts in zip(*samples, strict=True)]


@pytest.fixture(scope="module")
def library() -> Corpus:
    return load_corpus(STANDARD_LIBRARY, limit=2**20)


def test_the_default_text_is_the_same_every_time(library: Corpus) -> None:
    again = load_corpus(STANDARD_LIBRARY, limit=2**20)
    assert (library.data.digest, library.files, library.truncated) == (again.data.digest, again.files, True)
    assert len(library.content) == 2**20
    assert b"import" in library.content
    made, same, other = (load_corpus(SYNTHETIC, seed=seed).content for seed in (5, 5, 6))
    assert made == same != other


def test_targets_are_the_next_tokens_and_tokens_are_bytes_of_the_text(library: Corpus) -> None:
    tokens, targets = batch(library)
    assert tokens.dtype is targets.dtype is torch.int64
    assert tokens.shape == targets.shape == (4, 16)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(tokens, batch(library)[0])
    assert not any(torch.equal(tokens, batch(library, **{what: 0})[0]) for what in ("seed", "first"))
    for row, last in zip(tokens.tolist(), targets[:, -1].tolist(), strict=True):
        assert bytes([*row, last]) in library.content


def test_a_batch_stays_what_it_was_in_earlier_versions() -> None:
    """Figures of different versions can only be compared while this holds."""
    corpus = Corpus("numbers", bytes(range(256)), files=1)
    tokens, _ = batch(corpus, seed=0, first=0, batch_size=3, length=4)
    assert tokens[:, 0].tolist() == [107, 11, 99]


def test_a_folder_is_read_in_the_order_of_its_paths_without_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name, content in {
        "c.txt": "3",
        "a.txt": "1",
        "b/z.md": "5",
        "b/a.md": "4",
        ".git/x": "no",
        ".y": "no",
    }.items():
        (tmp_path / name).write_text(content)
    corpus = load_corpus(str(tmp_path))
    assert (corpus.content, corpus.files, corpus.truncated) == (b"1345", 4, False)
    for limit, whole in ((3, b"134"), (4, b"1345")):
        stopped = load_corpus(str(tmp_path), limit=limit)
        assert (stopped.content, stopped.truncated) == (whole, limit < 4)


def test_an_unreadable_file_and_an_empty_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A permission that is missing is feigned: root, as whom containers run tests, may read everything."""
    with pytest.raises(DataError, match="no text"):
        load_corpus(str(tmp_path))
    (tmp_path / "secret").write_text("text")

    def refuse(self: Path, mode: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"cannot read .*secret: Permission denied"):
        load_corpus(str(tmp_path / "secret"))


def test_text_shorter_than_a_sequence_is_refused() -> None:
    corpus = Corpus("short", b"12345", files=1)
    require_length(corpus, 4)
    with pytest.raises(DataError, match=r"holds 5 bytes, but sequences of 5 tokens need at least 6"):
        require_length(corpus, 5)
    assert batch(corpus, batch_size=2, length=4)[0].tolist() == [[49, 50, 51, 52]] * 2
