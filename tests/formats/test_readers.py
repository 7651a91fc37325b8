"""Every element that the frameworks saved is found, in bits; odd tensors and broken folders are read or named."""

from __future__ import annotations

import json
import pickle
import re
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import zerokit
from tests.formats.conftest import DEEPSPEED, FSDP2, expected_bytes, held_bytes
from tests.formats.make_fixtures import STEPS
from tests.support.checkpoints import example_content, example_extra, example_layout, write_checkpoint
from zerokit.checkpoint.formats import open_source
from zerokit.checkpoint.formats.deepspeed_files import read_states
from zerokit.checkpoint.formats.description import ModelNames
from zerokit.checkpoint.formats.foreign import ForeignCheckpoint
from zerokit.checkpoint.formats.pickles import Name, Record, parse_pickle, to_pickle
from zerokit.checkpoint.safetensors import Stream
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
    ("name", "kind"),
    [
        ("deepspeed-1-fp32", "optim"),
        ("deepspeed-2-fp32", "optim"),
        ("deepspeed-3-fp32", "optim"),
        ("deepspeed-3-fp32", "model"),
    ],
)
def test_files_of_two_ranks_that_are_exchanged_are_refused(
    made: Path, tmp_path: Path, name: str, kind: str
) -> None:
    """A file says inside under which name it was saved."""
    folder = Path(shutil.copytree(made / name, tmp_path / name))
    (first,), (second,) = (list(folder.rglob(f"*rank_{rank}_mp*{kind}*")) for rank in (0, 1))
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    with pytest.raises(
        CheckpointError, match=r"was saved as zero_pp_rank_\d_.*files of two ranks are exchanged"
    ):
        open_source(folder)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("adapter_model.safetensors", "an adapter of PEFT: merge it"),
        ("pytorch_model.bin", "weights in a pickle: give that file itself, or save with save_pretrained"),
        ("expert_0_mp_rank_00_model_states.pt", "mixture of experts"),
        ("layer_00-model_states.pt", "pipeline"),
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor or pipeline parallelism"),
        (
            "zero_pp_rank_1_mp_rank_00_optim_states.pt",
            "saved at stage 1, rank 0's file at stage 2: files of several",
        ),
    ],
)
def test_what_is_no_whole_checkpoint_says_what_to_do(
    made: Path, tmp_path: Path, name: str, expected: str
) -> None:
    folder = place = tmp_path
    if name.endswith(".pt"):
        folder = Path(shutil.copytree(made / "deepspeed-2-fp32", tmp_path / "other"))
        place = folder / f"global_step{STEPS}"
    other = made / "deepspeed-1-fp32" / f"global_step{STEPS}" / name
    (place / name).write_bytes(other.read_bytes() if other.exists() else b"")
    with pytest.raises(CheckpointError, match=expected):
        open_source(folder)


@pytest.fixture
def changed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Has a change made to all states that are read from files of DeepSpeed's."""

    def read(change: Callable[[Any], object], path: Path) -> Any:
        value, blobs = read_states(path)
        change(value)
        return value, blobs

    name = "zerokit.checkpoint.formats.deepspeed_files.read_states"
    return lambda change: monkeypatch.setattr(name, partial(read, change))


@pytest.mark.parametrize("kind", ["deepspeed-1-fp32", "deepspeed-2-fp32", "deepspeed-3-fp32"])
def test_a_model_file_that_counts_other_steps_is_doubted(made: Path, kind: str, changed: Any) -> None:
    assert not any("counts" in note for note in open_source(made / kind).notes)
    changed(lambda value: value.update(global_steps=STEPS + 1))
    with pytest.warns(ZerokitWarning, match=f"counts {STEPS + 1} steps, the optimizer's files {STEPS}: if"):
        open_source(made / kind).warn()


STAGE = "deepspeed.runtime.zero.config.ZeroStageEnum"


@pytest.mark.parametrize("kind", ["deepspeed-1-fp32", "deepspeed-2-fp32", "deepspeed-3-fp32"])
def test_the_stage_is_read_in_every_form_that_pythons_write(
    made: Path, tmp_path: Path, kind: str, changed: Any
) -> None:
    stage = int(kind[10])
    name = ("optimizer_states", "gradients", "weights")[stage - 1]
    expected = held_bytes(open_source(made / kind))
    for form in (stage, Record(STAGE, (stage,)), Name(f"{STAGE}.{name}", 2)):

        def change(value: Any, form: Any = form) -> None:
            if "optimizer_state_dict" in value:
                value["optimizer_state_dict"]["zero_stage"] = form

        changed(change)
        assert held_bytes(open_source(made / kind)) == expected
        cut = zerokit.reshard(made / kind, 2, tmp_path / f"cut-{type(form).__name__}")
        written = read_states(next(cut.rglob("*rank_0*optim_states.pt")))[0]
        assert repr(written["optimizer_state_dict"]["zero_stage"]) == repr(form)


@pytest.mark.parametrize(
    ("member", "value", "message"),
    [
        (
            "zero_stage",
            Name(f"{STAGE}.disabled", 2),
            f"its zero_stage is {STAGE}.disabled, expected 1, 2",
        ),
        ("zero_stage", Record("os.system", ("2",)), r"its zero_stage is os.system('2')"),
        ("zero_stage", 4, "its zero_stage is 4, expected 1, 2 or 3"),
        ("base_optimizer_state", "x", "its base_optimizer_state is 'x', expected a mapping or a list"),
        (
            "single_partition_of_fp32_groups",
            [None],
            "its single_partition_of_fp32_groups[0] is None",
        ),
        ("single_partition_of_fp32_groups", [], "0 groups of masters, expected 2"),
    ],
)
def test_what_deepspeed_does_not_write_is_named_with_its_file(
    made: Path, tmp_path: Path, member: str, value: Any, message: str
) -> None:
    folder = shutil.copytree(made / "deepspeed-2-fp32", tmp_path / "x")
    path = next(folder.rglob("*rank_1*optim_states.pt"))
    with zipfile.ZipFile(path) as archive:
        entries = {entry: archive.read(entry) for entry in archive.namelist()}
    (pickled,) = (name for name in entries if name.endswith("data.pkl"))
    states = parse_pickle(entries[pickled], "x")
    states["optimizer_state_dict"][member] = value
    entries[pickled] = to_pickle(states)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    with pytest.raises(CheckpointError, match=re.escape(f"{path}: {message}")):
        open_source(folder)


def _as_muon(value: Any) -> None:
    """The first group's states as DeepSpeed's Muon has them."""
    states = value.get("optimizer_state_dict", {})
    base = states.get("optimizer_state_dict", states.get("base_optimizer_state"))
    if base is not None:
        group = base["param_groups"][0]
        group["use_muon"] = True
        for number in group["params"]:
            base["state"][number] = {"momentum_buffer": base["state"][number]["exp_avg"]}


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_momentum_of_muon_is_read_where_no_tensor_is_cut(
    made: Path, tmp_path: Path, changed: Any, stage: int
) -> None:
    """At stages 1 and 2 a rank keeps it for whole tensors, so it is left out where two ranks share one."""
    two, one = made / f"deepspeed-{stage}-fp32", tmp_path / "one"
    zerokit.reshard(two, 1, one)
    adam = held_bytes(open_source(two))
    changed(_as_muon)
    for path in (two, one):
        source = open_source(path)
        held = {
            kind: value for kind, value in held_bytes(source).items() if kind.startswith("momentum_buffer")
        }
        if path == two and stage < 3:
            assert not held
            assert any(
                "momentum_buffer of group 0, whose tensors ranks share" in note for note in source.notes
            )
            continue
        assert held == {
            f"momentum_buffer/{name}": adam[f"exp_avg/{name}"]
            for name in ("embed.weight", "blocks.0.weight", "blocks.1.weight")
        }


@pytest.mark.parametrize("saved", [True, False])
def test_round_robin_gradients_order_parameters_anew_for_each_world(
    made: Path, tmp_path: Path, changed: Any, saved: bool
) -> None:
    """Every N-th parameter from the first, from the second, and so on, whether or not the configuration was a file."""
    paths = made / "deepspeed-2-fp32", tmp_path / "two", tmp_path / "four"

    def change(value: Any) -> None:
        value["ds_config"] = (
            {"zero_optimization": {"round_robin_gradients": True}} if saved else "config.json"
        )
        states = value.get("optimizer_state_dict", {})
        if states and not paths[1].exists():  # names in another order than in the file
            states["param_slice_mappings"] = [
                dict(reversed(m.items())) for m in states["param_slice_mappings"]
            ]

    changed(change)
    for world, source, output in zip((2, 4), paths, paths[1:], strict=False):
        zerokit.reshard(source, world, output)
    sources: Any = [open_source(path) for path in paths]
    four, two, again = (list(source.described.details.shapes[1]) for source in sources)
    assert (two, again) == ([four[index] for index in (0, 3, 1, 2, 4)], four)
    assert held_bytes(sources[0]) == held_bytes(sources[1]) == held_bytes(sources[2])


def test_sub_groups_of_an_unknown_size_are_not_cut_anew(made: Path, tmp_path: Path, changed: Any) -> None:
    changed(lambda value: value.update(ds_config="config.json"))
    with pytest.raises(CheckpointError, match="does not hold the sub_group_size"):
        zerokit.reshard(made / "deepspeed-3-fp32", 2, tmp_path / "two")
    assert not (tmp_path / "two").exists()


KINDS = ("wire_residual", "outer.anchor", "outer.momentum_buffer", "ema")


def test_residuals_and_states_of_islands_are_kept_or_named(tmp_path: Path) -> None:
    layout, content = example_layout(3), example_content(example_layout(1))
    line = list(layout.parameters)
    places = tuple(place for place, parameter in enumerate(line) if parameter.trainable)
    streams = (*content.streams, *(Stream(kind, "float32", places) for kind in KINDS))
    values = content.values | {
        (kind, line[place].name): bytes([number + 1]) * (4 * line[place].numel)
        for number, kind in enumerate(KINDS)
        for place in places
    }
    content = replace(
        content,
        streams=tuple(sorted(streams, key=lambda stream: stream.order)),
        values=values,
        extra=example_extra(user=("a", 1), local_steps={"every": 4, "done": 2}),
    )
    trained = tmp_path / "trained"
    write_checkpoint(trained, layout, content)
    zerokit.convert(trained, tmp_path / "two", world=2)
    assert zerokit.diff(trained, tmp_path / "two").same
    with pytest.warns(ZerokitWarning, match="DCP has no place for local_steps, extra: not carried over"):
        zerokit.convert(trained, tmp_path / "dcp", format="dcp", world=2)
    zerokit.convert(tmp_path / "dcp", tmp_path / "back", format="zerokit")
    expected = held_bytes(open_source(trained))
    assert held_bytes(open_source(tmp_path / "back")) == expected
    assert {key.partition("/")[0] for key in expected} >= set(KINDS)


def test_what_is_no_plain_state_is_named_and_an_inner_step_is_not_the_step(tmp_path: Path) -> None:
    extra = example_extra(
        user={"inner": {"step": 7}},
        values={"calls": {"gain": 2}, "seen": {"gain": {"$": "set", "items": [1]}}},
    )
    write_checkpoint(
        tmp_path / "run", example_layout(1), replace(example_content(example_layout(1)), extra=extra)
    )
    with pytest.warns(ZerokitWarning, match=r"DCP has no place for state\.seen\.gain: not carried over"):
        zerokit.convert(tmp_path / "run", tmp_path / "dcp", format="dcp")
    source = open_source(tmp_path / "dcp")
    assert (source.step, source.extra()["user"]) == (100, {"inner": {"step": 7}})


def save_dcp(path: Path, content: dict[str, Any]) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(content, checkpoint_id=str(path), no_dist=True)


@pytest.mark.parametrize("trained", [True, False])
def test_an_average_beside_the_model_is_not_taken_for_it(tmp_path: Path, trained: bool) -> None:
    weight, average = torch.ones(2), torch.zeros(2)
    state = {"state": {"w": {"exp_avg": weight}}, "param_groups": [{"params": ["w"]}]}
    others = {"count": average, **({"optim": state} if trained else {})}
    both = {"ema": {"w": average, "v": average}, "model": {"w": weight}}
    save_dcp(tmp_path / "usual", {"app": both | others} if trained else both | others)
    held = held_bytes(open_source(tmp_path / "usual"))
    assert held["master/w" if trained else "param/w"] == weight.numpy().tobytes()


def test_lists_of_mappings_stay_lists(tmp_path: Path) -> None:
    """torch stores their elements one by one. A scheduler's step is not the checkpoint's."""
    own = {"schedulers": [{"last": 1}, {"step": 9}], "plain": [1, [2]]}
    save_dcp(tmp_path / "theirs", {"model": {"w": torch.ones(2)}, "own": own})
    zerokit.reshard(tmp_path / "theirs", 2, tmp_path / "ours")
    for source in (open_source(tmp_path / name) for name in ("theirs", "ours")):
        assert (source.extra()["user"]["own"], source.step) == (own, 0)


def test_a_rate_may_be_a_tensor_and_groups_may_not_be_one_value(tmp_path: Path) -> None:
    """As those of a compiled optimizer; as torch before 2.4 wrote them."""
    for kind in (list, tuple):  # a list's members are stored one by one
        groups = kind([{"lr": torch.tensor(0.25), "params": ["w"]}])
        optim = {"state": {"w": {"exp_avg": torch.ones(2)}}, "param_groups": groups}
        save_dcp(tmp_path / kind.__name__, {"model": {"w": torch.ones(2)}, "optim": optim})
    assert open_source(tmp_path / "list").extra()["groups"] == [{"lr": 0.25}]
    with pytest.raises(CheckpointError, match=r"param_groups is one value, as torch before 2\.4 wrote it"):
        open_source(tmp_path / "tuple")


ODD = {
    "float64": torch.arange(3, dtype=torch.float64),
    "half": torch.arange(3).half(),
    "e4m3": torch.arange(12.0).reshape(3, 4).to(torch.float8_e4m3fn),
    "e5m2": torch.arange(12.0).reshape(3, 4).to(torch.float8_e5m2),
    "e4m3 from 0": torch.arange(12.0).to(torch.float8_e4m3fnuz),
    "e5m2 from 0": torch.arange(12.0).to(torch.float8_e5m2fnuz),
    "scales": torch.tensor([0.5, 1.0, 2.0]).to(torch.float8_e8m0fnu),
    "pairs": torch.arange(12, dtype=torch.uint8).reshape(3, 4).view(torch.float4_e2m1fn_x2),
    "complex": torch.tensor([[1 + 2j, 3 - 4j]]),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 4),
    "flags": torch.tensor([True, False]),
    "wide": torch.tensor([1, 60_000], dtype=torch.uint16),
    "ünï/ cødé.名": torch.ones(2),
    'x"y\\z\n': torch.ones(1),
}


def test_odd_tensors_go_through_every_format(tmp_path: Path) -> None:
    save_dcp(tmp_path / "theirs", {"model": ODD})
    expected = {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in ODD.items()}
    path = tmp_path / "theirs"
    for number, form in enumerate(("zerokit", "dcp", "huggingface", "zerokit")):
        path = zerokit.convert(path, tmp_path / str(number), format=form).path
        assert zerokit.verify(path).intact
        found = {key.partition("/")[2]: value for key, value in held_bytes(open_source(path)).items()}
        assert found == expected, form


def _save_packed(folder: Path, dtype: str, shape: list[int], data: bytes) -> Path:
    header = json.dumps({"w": {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}}).encode()
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    return folder


@pytest.mark.parametrize(("dtype", "bits"), [("F4", 4), ("F6_E2M3", 6), ("F6_E3M2", 6)])
def test_numbers_of_less_than_a_byte_are_copied_as_they_are(tmp_path: Path, dtype: str, bits: int) -> None:
    """Shapes count numbers, of which several fill an element; the stock reader checks what is written."""
    data = bytes(range(4 * bits))
    path = _save_packed(tmp_path / "theirs", dtype, [4, 8], data)
    for form in ("zerokit", "huggingface"):
        path = zerokit.convert(path, tmp_path / form, format=form).path
    with safe_open(path / "model.safetensors", "np") as stock:
        held = stock.get_slice("w")
        assert (held.get_dtype(), held.get_shape()) == (dtype, [4, 8])
    assert (path / "model.safetensors").read_bytes().endswith(data)
    read = zerokit.Checkpoint(tmp_path / "zerokit").read("param", "w")
    assert (str(read.dtype), read.tobytes()) == ("uint8", data)


def test_packed_numbers_that_torch_or_an_element_cannot_hold_are_refused(tmp_path: Path) -> None:
    path = _save_packed(tmp_path / "six", "F6_E2M3", [4, 8], bytes(24))
    with pytest.raises(CheckpointError, match="torch has no such dtype; choose format='huggingface'"):
        zerokit.convert(path, tmp_path / "dcp", format="dcp")
    path = _save_packed(tmp_path / "odd", "F6_E2M3", [2, 6], bytes(9))
    with pytest.raises(
        CheckpointError, match=r"F6_E2M3 of shape \(2, 6\): the last dimension is no multiple of 4"
    ):
        open_source(path)


def _save_shard(folder: Path, rank: int, start: int, tensors: dict[str, torch.Tensor]) -> None:
    """Rows of tensors from `start` on, as DCP writes a rank's."""
    placed = json.dumps({name: {"saved_offsets": [start, 0]} for name in tensors})
    name = f"shard-{rank:05d}-model-00001-of-00001.safetensors"
    save_file(tensors, folder / name, {"DCP_SHARDING_INFO": placed})


def test_integers_that_dcp_has_cut_are_whole_again(tmp_path: Path) -> None:
    """As quantised weights of FSDP2 in safetensors: each rank's file has rows of them."""
    whole = {name: torch.arange(48, dtype=torch.uint8).reshape(8, 6) + n for n, name in enumerate("ab")}
    for start in (0, 4):
        rows = {name: tensor[start : start + 4].contiguous() for name, tensor in whole.items()}
        _save_shard(tmp_path, 1 + start // 4, start, rows)
    zerokit.consolidate(tmp_path, tmp_path.with_name("model"))
    held = load_file(tmp_path.with_name("model") / "model.safetensors")
    assert all(held[name].equal(tensor) for name, tensor in whole.items())


def test_a_file_that_a_save_of_more_ranks_has_left_is_refused(tmp_path: Path) -> None:
    for rank, start, stop in ((1, 0, 4), (2, 4, 8), (3, 6, 8)):
        _save_shard(tmp_path, rank, start, {"a": torch.full((stop - start, 2), float(rank))})
    with pytest.raises(CheckpointError, match="each once; files of several saves may be mixed"):
        open_source(tmp_path)


def test_large_integers_are_not_held_in_memory_as_buffers_are(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    tensors = {name: torch.zeros(size, dtype=torch.uint8) for name, size in (("w", (1 << 26) + 1), ("b", 2))}
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    zerokit.convert(tmp_path / "model", tmp_path / "dcp", format="dcp")
    for path in (tmp_path / "model", tmp_path / "dcp"):
        source = open_source(path)
        assert (source.names, list(source.buffers)) == (["w"], ["b"])


def test_a_chunk_that_is_named_twice_is_refused(tmp_path: Path) -> None:
    save_dcp(tmp_path, {"model": {"a": torch.ones(2)}})
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.a"].chunks *= 2
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(
        CheckpointError, match="param of a has elements up to 2 of 2: all are expected, each once"
    ):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"model": {"c": torch.ones(2, dtype=torch.complex128)}},
            "has elements of complex128, which zerokit does not",
        ),
        (
            {"model": {"w": torch.ones(2)}, "optim": {"param_groups": [{"params": [0], "lr": 0.1}]}},
            "numbers instead of names: save what get_state_dict",
        ),
        (
            {name: torch.ones(2) for name in ("decoder.w", "optimizer.state.exp_avg.decoder.w")},
            "is of Megatron-Core's own format",
        ),
        (
            {name: {"w": torch.ones(2), "v": torch.ones(3)} for name in ("ema", "net")},
            r"weights of several models \(ema\., net\.\): zerokit reads one",
        ),
    ],
)
def test_what_cannot_be_told_or_held_is_named(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    save_dcp(tmp_path / "theirs", content)
    with pytest.raises(CheckpointError, match=message):
        zerokit.convert(tmp_path / "theirs", tmp_path / "out", format="zerokit")
    assert not (tmp_path / "out").exists()


INDEX = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
"""The file of each tensor, before the folder is damaged."""


@pytest.mark.parametrize(
    ("index", "files", "message"),
    [
        (INDEX, {1: "a"}, r"model-2\.safetensors: cannot be opened: No such file"),
        (INDEX, {1: "b", 2: "a"}, "'a' is in model-1.safetensors, but it is in model-2.safetensors"),
        (
            INDEX | {"c": "model-2.safetensors"},
            {1: "a", 2: "b"},
            "'c' is in .*, but it is in none of its files",
        ),
        ({"a": "model-1.safetensors"}, {1: "ab"}, "'b' is in no file, but it is in model-1.safetensors"),
        (INDEX, {1: "a", 2: "ab"}, "'a' is in model-1.safetensors, but it is in model-2.safetensors"),
        (
            {"a": "../model.safetensors"},
            {1: "a"},
            "'../model.safetensors', expected a safetensors file beside",
        ),
        ([1], {1: "a"}, "not an index"),
    ],
)
def test_an_index_must_be_that_of_its_files(
    tmp_path: Path, index: object, files: dict[int, str], message: str
) -> None:
    folder = tmp_path / "model"

    def write(index: object, files: dict[int, str]) -> None:
        folder.mkdir()
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": index} if isinstance(index, dict) else index)
        )
        for number, names in files.items():
            save_file({name: torch.ones(2) for name in names}, folder / f"model-{number}.safetensors")

    write(INDEX, {1: "a", 2: "b"})
    assert len(open_source(folder).names) == 2
    save_file({"c": torch.ones(2)}, folder / "model.safetensors")  # transformers takes it before the index
    assert open_source(folder).names == ["c"]
    shutil.rmtree(folder)
    write(index, files)
    for use in (zerokit.inspect, lambda path: zerokit.convert(path, tmp_path / "out", format="zerokit")):
        with pytest.raises(CheckpointError, match=message):
            use(folder)
    assert not (tmp_path / "out").exists()
