"""Which cell is chosen, what does not fit, and what is said of it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import run_python
from tests.planning.models import QWEN
from zerokit.bench.plans.ask import plan
from zerokit.bench.plans.subjects import subject_named
from zerokit.errors import UsageError
from zerokit.planning.cells import Plan


def ask(model: str = "gpt-tiny", **more: Any) -> Plan:
    options: dict[str, Any] = {"gpus": 8, "device": "h100-80", "seq_len": 64} | more
    return plan(model, **options)


def test_the_best_cell_is_the_fastest_that_fits() -> None:
    found = ask(gpus=16, nodes=2, batch_size=(1, 4))
    rates = [one.units_per_s or 0.0 for one in found.fitting]
    assert rates == sorted(rates, reverse=True)
    assert found.best is found.fitting[0]
    assert not found.too_large
    # All pairs of stages on two axes and all stages on one, two micro-batches, with and without recomputation.
    assert len(found.fitting) == (10 + 4) * 2 * 2
    assert found.runner_up is not None
    assert found.runner_up.cell.label in found.why


def test_a_model_without_blocks_is_not_recomputed() -> None:
    found = ask("mlp-mnist", seq_len=None, batch_size=4)
    assert not any(one.cell.recompute for one in found.fitting)
    with pytest.raises(UsageError, match=r"no nn.ModuleList.*omit --recompute"):
        ask("mlp-mnist", seq_len=None, recompute=True)


def test_what_does_not_fit_misses_bytes(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        'gpus_per_node = 8\n[device]\nname = "small"\ntflops = { bf16 = 100 }\nmemory_gb = 0.05\n'
        "memory_gb_per_s = 500\n[inner]\ngb_per_s = 20\n"
    )
    found = ask("gpt-5m", device=None, cluster=file, seq_len=256, batch_size=1)
    assert found.too_large
    for one in found.too_large:
        assert one.memory.needed - one.missing_bytes == one.room_bytes == 5 * 10**7
    assert {one.cell.stages for one in found.too_large} >= {(0, 0)}
    assert all(one.time is None for one in (*found.fitting, *found.too_large))  # nothing was measured on it
    assert any(text.startswith("No times in bf16: ") for text in found.assumptions)
    assert all(one.time is None for one in ask(device="l40s", gpus=16, nodes=2).fitting)


def test_samples_of_a_step_decide_how_often_micro_batches_accumulate() -> None:
    found = ask(samples_per_step=64, batch_size=(1, 2, 3, 16), stage=2, recompute=False)
    assert {(one.cell.micro_batch, one.cell.accumulate) for one in found.fitting} == {(1, 8), (2, 4)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "h100-81"}, "device 'h100-81' is unknown: choose one of a100-40"),
        ({"device": None}, "no device: give --device"),
        ({"gpus": 9, "nodes": 2}, "9 devices cannot be divided equally among 2 nodes"),
        ({"model": "gpt-tyni"}, "did you mean gpt-tiny"),
        ({"model": "nothing.json"}, "is not a model configuration"),
        ({"seq_len": 65}, "exceeds the 64 positions of gpt-tiny"),
        ({"mesh": "2x3"}, "mesh 2x3 has 6 ranks"),
        ({"mesh": "8x1"}, "one rank on its inner axis: write one axis as 1x8"),
        ({"samples_per_step": 64, "accumulate": 2}, "exclude each other"),
        ({"bucket_mb": math.inf}, "bucket_mb inf: expected a number above 0"),
        ({"nodes": 2.0}, "nodes 2.0: expected a whole number above 0"),
        ({"mesh": (2, 4)}, "mesh .2.: expected OUTERxINNER, such as 2x4"),
        ({"record": "nothing.json"}, "cannot read the bench record"),
        ({"model": "tests.planning.models:double", "seq_len": None}, "linear.weight is torch.float64"),
        (
            {"model": "tests.planning.models:fours", "seq_len": None},
            "samples cannot be made .*: give one --batch-size",
        ),
        ({"model": "tests.planning.models:labelled", "seq_len": None}, "a tuple that holds a str: expected"),
    ],
)
def test_what_is_unknown_is_said_in_a_sentence(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ask(**options)


def test_buckets_that_were_asked_for_are_in_both_lines_and_the_reason_names_what_was_asked_for() -> None:
    found = ask(batch_size=1, stage=3, recompute=False, bucket_mb=0.5)
    assert (found.bench_line or "").endswith("--bucket-mb 0.5")
    assert (found.optimizer_arguments or "").endswith("bucket_mb=0.5)")
    assert found.why.endswith("no other stage, mesh or recomputation was asked for.")


def test_the_reason_tells_precisions_apart() -> None:
    found = ask(batch_size=64, stage=1, recompute=False, precision=("bf16", "fp32"))
    assert found.best is not None
    other = {"bf16": "fp32", "fp32": "bf16"}[found.best.cell.precision]
    assert f"stage 1, micro-batch 64 in {other};" in found.why


def test_a_file_of_smaller_nodes_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('device = "h100-80"\ngpus_per_node = 4\n')
    with pytest.raises(UsageError, match=r"16 devices on 2 nodes are 8 a node, and .* has 4"):
        ask(device=None, cluster=file, gpus=16, nodes=2)


def test_hugging_faces_configurations(tmp_path: Path) -> None:
    """They are planned as the model in a factory is, and their parts limit sequences and give images."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(QWEN))
    for_both: dict[str, Any] = {"seq_len": None, "batch_size": 2, "recompute": False, "stage": 3}
    found, own = ask(str(file), **for_both), ask("tests.planning.models:qwen", **for_both)
    assert (found.parameters, found.bench_line) == (own.parameters, None)
    assert found.best is not None
    assert found.subject.units_per_sample == 64
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"vision_config": small | {"image_size": 32, "patch_size": 8}, "text_config": small}
    file.write_text(
        json.dumps({"model_type": "clip", "architectures": ["CLIPForImageClassification"]} | vision)
    )
    assert [tuple(one.shape) for one in subject_named(str(file)).batch(2)] == [(2, 3, 32, 32), (2,)]
    file.write_text(json.dumps({"model_type": "deit"} | small))  # which has two classes of one task
    assert (
        subject_named(str(file))
        .assumptions[0]
        .startswith("Trained as transformers' DeiTForImageClassification,")
    )
    text = {"model_type": "roberta", "max_position_embeddings": 66, "pad_token_id": 1, "vocab_size": 50}
    file.write_text(json.dumps(text | small))
    assert subject_named(str(file)).units_per_sample == 64
    quantised = text | small | {"model_type": "t5", "quantization_config": {"load_in_4bit": True}}
    file.write_text(json.dumps(quantised))
    subject = subject_named(str(file), seq_len=8)
    assert "Weights are trained, so quantization_config is ignored." in subject.assumptions
    assert subject.build()(*subject.batch(1)).isfinite()  # no decoder_start_token_id is named


# The kernel hands a parent's ru_maxrss on to the program that it starts, VmHWM begins anew.
_MANY = """
from tests.cli.commands import run_python
from zerokit.bench.plans.ask import plan
found = plan("gpt-5m", gpus=16384, device="h100-80", nodes=2048, seq_len=256, batch_size=4)
assert len(found.fitting) == (10 + 4) * 2
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def test_16384_ranks_take_less_than_a_gigabyte(tmp_path: Path) -> None:
    done = run_python(tmp_path, "-c", _MANY)
    assert int(done.stdout) * 1024 < 10**9, done.stderr
