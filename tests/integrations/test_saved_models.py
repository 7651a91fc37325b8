"""`save_pretrained` and its like of sharded models: the files of the plain model, and no rank that holds it whole."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

import torch
import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import zerokit
from tests.integrations.launched import as_launched
from tests.integrations.trainers import VOCABULARY, build
from tests.support.distributed import run_ranks
from tests.support.on_ranks import on_ranks
from zerokit.integrations.accelerate import ZeroAccelerator
from zerokit.placement import stage_of
from zerokit.runtime import saving
from zerokit.runtime.torch_internals import without_torch_function
from zerokit.runtime.weights import WholeWeights


def _llama(layers: int = 6) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    return LlamaForCausalLM(config)


def _sharded(model: nn.Module, stage: int = 3, **options: Any) -> zerokit.ZeroOptimizer:
    given: dict[str, Any] = {"precision": "fp32", "lr": 1e-2, "bucket_mb": 0.001} | options
    return zerokit.ZeroOptimizer(model, torch.optim.AdamW, stage=stage_of(stage), **given)


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _on_first(do: Callable[[], object]) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        do()
    dist.barrier()


@contextmanager
def _held() -> Iterator[list[int]]:
    """Bytes of the storages of all tensors that are new, whenever a weight is written."""

    def held() -> int:
        gc.collect()
        with without_torch_function():  # guarded parameters refuse to show their storage
            storages = [
                each.untyped_storage()
                for each in gc.get_objects()
                if isinstance(each, torch.Tensor) and each.device.type == "cpu"
            ]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    gc.collect()
    gc.freeze()  # what was there before is not looked at again
    found, write = [0], saving._write

    def measured(file: Any, offset: int, value: torch.Tensor) -> None:
        found.append(held())
        write(file, offset, value)

    try:
        with mock.patch.object(saving, "_write", measured):
            yield found
    finally:
        gc.unfreeze()


CASES: list[tuple[int, torch.dtype, bool, str]] = [
    (3, torch.float32, True, "50GB"),
    (3, torch.float32, False, "20kB"),
    (3, torch.bfloat16, True, "20kB"),
    (1, torch.float32, True, "20kB"),
    (1, torch.bfloat16, False, "50GB"),
]


@on_ranks(2, cases=CASES)
def test_files_are_those_of_the_plain_model(case: tuple[int, torch.dtype, bool, str], tmp_path: Path) -> None:
    stage, dtype, tied, size = case
    plain, model = build(tied=tied).to(dtype), build(tied=tied).to(dtype)
    optimizer = _sharded(model, stage, precision="bf16" if dtype == torch.bfloat16 else "fp32")
    target, expected = tmp_path / f"{case}", tmp_path / f"plain {case}"
    with _held() as held:
        model.save_pretrained(target, max_shard_size=size)
    assert (len(held) > 1) == (dist.get_rank() == 0), "weights were not written one by one"
    _on_first(lambda: plain.save_pretrained(expected, max_shard_size=size))
    assert _files(target) == _files(expected)
    assert optimizer.traffic().elements == 0


def _no_rank_is_full(folder: str) -> tuple[int, int, int]:
    model = _llama()
    optimizer = _sharded(model)
    with _held() as held:
        model.save_pretrained(folder)
    return max(held), max(4 * unit.numel for unit in optimizer.layout.units), 4 * model.num_parameters()


def test_no_rank_holds_more_than_two_units(tmp_path: Path) -> None:
    (held, unit, model), (other, *_) = run_ranks(2, _no_rank_is_full, str(tmp_path))
    assert 0 < held <= 2 * unit < model / 3
    assert other == 0
    _assert_equal(load_file(tmp_path / "model.safetensors"), _llama().state_dict())


def _assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@on_ranks(2)
def test_weights_that_transformers_changes_are_saved_whole(tmp_path: Path) -> None:
    """Experts of one tensor are written as several."""

    def made() -> MixtralForCausalLM:
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_local_experts": 3}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
        return MixtralForCausalLM(MixtralConfig(vocab_size=VOCABULARY, **sizes, **heads))

    plain, model = made(), made()
    _sharded(model)
    model.save_pretrained(tmp_path / "model")
    _on_first(lambda: plain.save_pretrained(tmp_path / "plain"))
    assert _files(tmp_path / "model") == _files(tmp_path / "plain")


@on_ranks(2)
def test_a_write_that_fails_leaves_no_file_and_all_ranks_able_to_go_on(tmp_path: Path) -> None:
    model = _llama(2)
    optimizer = _sharded(model)
    full = mock.Mock(side_effect=[None, None, OSError(28, "No space left on device")])
    writes = dist.get_rank() == 0
    with mock.patch.object(saving, "_write", full):
        if writes:
            with pytest.raises(OSError, match="No space left"):
                model.save_pretrained(tmp_path / "model")
        else:
            model.save_pretrained(tmp_path / "model")
    dist.barrier()
    assert not [path.name for path in (tmp_path / "model").iterdir() if "safetensors" in path.name]
    tokens = torch.arange(8)[None]
    for _ in range(2):
        optimizer.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()
        model.save_pretrained(tmp_path / "model")
    with optimizer.gathered():
        live = {name: value.detach().clone() for name, value in model.state_dict().items()}
    _assert_equal(load_file(tmp_path / "model/model.safetensors"), live)


@pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
@on_ranks(2)
def test_adapters_are_saved_without_their_base(tmp_path: Path) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # of names in PEFT that transformers has renamed
    from peft import LoraConfig, get_peft_model

    def made() -> Any:
        model = get_peft_model(_llama(), LoraConfig(task_type="CAUSAL_LM", r=2))
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                nn.init.normal_(parameter)
        return model

    plain, model = made(), made()
    _sharded(model)
    gathered = []
    gather = WholeWeights._gather

    def recorded(weights: WholeWeights, unit: Any) -> Any:
        gathered.append([parameter.requires_grad for parameter in unit.parameters])
        return gather(weights, unit)

    with mock.patch.object(WholeWeights, "_gather", recorded):
        model.save_pretrained(tmp_path / "model")
    _on_first(lambda: plain.save_pretrained(tmp_path / "plain"))
    assert gathered
    assert all(all(unit) for unit in gathered), "the base was gathered"
    found, expected = (
        load_file(tmp_path / name / "adapter_model.safetensors") for name in ("model", "plain")
    )
    _assert_equal(found, expected)


def _tied_net() -> nn.Module:
    torch.manual_seed(0)
    net = nn.ModuleDict(
        {"a": nn.Linear(8, 8, bias=False), "norm": nn.BatchNorm1d(8), "b": nn.Linear(8, 8, bias=False)}
    )
    net["b"].weight = net["a"].weight
    net["c"] = nn.Linear(8, 30)
    return net


@on_ranks(2, cases=("10GB", "600B"))
def test_accelerates_files_hold_the_same_weights(size: str, tmp_path: Path) -> None:
    as_launched()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = ZeroAccelerator(cpu=True, stage=3)
    net = _tied_net()
    model, _ = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    target = tmp_path / size
    with _held() as held:
        accelerator.save_model(model, target, max_shard_size=size.replace("600B", "0.6KB"))
    dist.barrier()
    assert (len(held) > 1) == (dist.get_rank() == 0)
    found: dict[str, torch.Tensor] = {}
    for path in target.glob("*.safetensors"):
        found |= load_file(path)
    expected = _tied_net().state_dict()
    del expected["b.weight"]
    _assert_equal(found, expected)
    assert (target / "model.safetensors.index.json").is_file() == (size == "600B")
    accelerator.save_model(model, tmp_path / "pickled", safe_serialization=False)
    dist.barrier()
    pickled = torch.load(tmp_path / "pickled/pytorch_model.bin", weights_only=True)
    _assert_equal(pickled, _tied_net().state_dict())
