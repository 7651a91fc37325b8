"""Every element that the frameworks saved is found, in bits, and so is what goes with it."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.formats.conftest import DEEPSPEED, FSDP2
from tests.formats.make_fixtures import STEPS
from tests.formats.reading import expected_bytes, held_bytes
from zerokit.checkpoint.formats import open_source
from zerokit.checkpoint.formats.deepspeed_files import read_states
from zerokit.checkpoint.formats.foreign import ForeignCheckpoint
from zerokit.checkpoint.formats.names import ModelNames
from zerokit.checkpoint.verify import verify
from zerokit.errors import CheckpointError, ZerokitWarning


@pytest.mark.parametrize("name", [*DEEPSPEED, *FSDP2])
def test_streams_groups_and_step_counts_are_what_the_framework_held(made: Path, name: str) -> None:
    source = open_source(made / name)
    assert held_bytes(source) == expected_bytes(made / name)
    assert source.step == STEPS or name == "fsdp2-accelerate"  # which does not save the step
    assert not source.weights_only
    groups = source.extra()["groups"]
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(1e-2, 0.1), (3e-3, 0.0)]
    assert groups[0]["betas"] == (0.9, 0.999)
    by_name = {p.name: p for p in source.layout.parameters}
    assert {name for name, p in by_name.items() if p.trainable and p.group == 0} == {
        "embed.weight",
        "blocks.0.weight",
        "blocks.1.weight",
    }
    assert by_name["embed.weight"].aliases == ("head.weight",)
    assert not by_name["frozen.weight"].trainable
    (scalar,) = source.manifest.scalars
    dtype, shape, content = source.common_tensor("optimizer/step")
    assert (scalar.kind, dtype, shape) == ("step", "float32", (8,))
    assert set(struct.unpack("<8f", content)) == {float(STEPS)}


def test_client_state_and_loss_scale_are_carried(made: Path) -> None:
    user = open_source(made / "deepspeed-2-bf16").extra()["user"]
    assert (user["seen"], user["name"]) == (24, "client")
    assert open_source(made / "fsdp2-plain").extra()["user"] == {"step": STEPS, "note": ("text", 1.5)}
    scaler = open_source(made / "deepspeed-2-fp16").extra_plain()["scaler"]
    assert float.fromhex(scaler["value"]) == 16.0
    assert scaler["good_steps"] == STEPS


@pytest.mark.parametrize("name", ["fsdp2-weights", "fsdp2-safetensors"])
def test_weights_alone_are_read_as_such(made: Path, name: str) -> None:
    source = open_source(made / name)
    assert source.weights_only
    expected = {key.partition("/")[2]: value for key, value in expected_bytes(made / name).items()}
    held = {key.partition("/")[2]: value for key, value in held_bytes(source).items()}
    held.pop("head.weight", None)  # stored twice by the one, not at all by the other
    assert held == {key: expected[key] for key in held}
    assert expected.keys() <= held.keys()


def test_a_model_settles_what_a_format_does_not_say(made: Path) -> None:
    source = open_source(made / "fsdp2-safetensors")
    assert isinstance(source, ForeignCheckpoint)
    names = {p.name: p.aliases for p in open_source(made / "fsdp2-plain").layout.parameters}
    fitted = source.fitted(ModelNames(names, {"seen", "running"}))
    assert set(fitted.buffers) == {"seen", "running"}
    assert set(fitted.names) == set(names)
    renamed = source.fitted(ModelNames({}, ()), {"blocks.": "layers."})
    assert "layers.0.weight" in renamed.names


@pytest.mark.parametrize(
    ("name", "keep", "pattern", "expected"),
    [
        ("deepspeed-2-fp32", False, "*rank_1_mp*optim*", "rank 1's file of optim_states is missing"),
        ("deepspeed-2-fp32", False, "*rank_3_mp*optim*", "3 ranks' optimizer states are there, expected 4"),
        ("deepspeed-3-fp32", False, "*rank_2_mp*model*", "rank 2's file of model_states is missing"),
        ("deepspeed-1-fp32", True, "*rank_1_mp*optim*", "truncated"),
        ("fsdp2-plain", False, "__1_0.distcp", "No such file"),
        ("fsdp2-plain", True, "__1_0.distcp", "truncated"),
        # DCP writes it last: a killed save has none.
        ("fsdp2-accelerate", False, "optimizer_0/.metadata", r"optimizer_0/\.metadata: cannot be opened"),
        ("fsdp2-safetensors", True, "shard-00002*", "the file has"),
        ("fsdp2-safetensors", False, "shard-00001*", "has elements up to 0"),
    ],
)
def test_missing_and_truncated_files_are_refused(
    made: Path, tmp_path: Path, name: str, keep: bool, pattern: str, expected: str
) -> None:
    folder = Path(shutil.copytree(made / name, tmp_path / name))
    path = next(folder.rglob(pattern))
    path.write_bytes(path.read_bytes()[:-100]) if keep else path.unlink()
    with pytest.raises(CheckpointError, match=expected):
        open_source(folder)
    (finding,) = verify(folder).findings
    assert str(finding)[0] != ":"  # it is of no one file


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("adapter_model.safetensors", "an adapter of PEFT: merge it"),
        ("pytorch_model.bin", "weights in a pickle: save them with save_pretrained"),
        ("expert_0_mp_rank_00_model_states.pt", "mixture of experts"),
        ("layer_00-model_states.pt", "pipeline"),
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor or pipeline parallelism"),
    ],
)
def test_weights_that_are_not_whole_say_what_to_do(
    made: Path, tmp_path: Path, name: str, expected: str
) -> None:
    folder = place = tmp_path
    if name.endswith(".pt"):
        folder = Path(shutil.copytree(made / "deepspeed-2-fp32", tmp_path / "other"))
        place = folder / f"global_step{STEPS}"
    (place / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=expected):
        open_source(folder)


def test_files_of_two_saves_are_not_mixed(made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made / "deepspeed-2-fp32", tmp_path / "mixed"))
    other = made / "deepspeed-1-fp32" / f"global_step{STEPS}" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    shutil.copy(other, next(folder.rglob("zero_pp_rank_1_mp*")))
    with pytest.raises(
        CheckpointError, match="saved at stage 1, rank 0's file at stage 2: files of several saves"
    ):
        open_source(folder)


@pytest.mark.parametrize("kind", ["deepspeed-1-fp32", "deepspeed-2-fp32", "deepspeed-3-fp32"])
def test_a_model_file_that_counts_other_steps_is_doubted(
    made: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not any("counts" in note for note in open_source(made / kind).notes)

    def later(path: Path) -> Any:
        value, blobs = read_states(path)
        if "global_steps" in value:
            value["global_steps"] += 1
        return value, blobs

    monkeypatch.setattr("zerokit.checkpoint.formats.deepspeed.read_states", later)
    with pytest.warns(ZerokitWarning, match=f"counts {STEPS + 1} steps, the optimizer's files {STEPS}: if"):
        open_source(made / kind).warn()
