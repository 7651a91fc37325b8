"""Wrong use of every command: exit code 2, one sentence on stderr, and nothing is written."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.bench.records import make_cell
from zerokit.bench.record.record import write_record
from zerokit.cli import cli

REFUSED = {
    "bench --nodes 0": "Invalid value for '--nodes': 0 is not in the range x>=1.",
    "bench --wire fp16": "'fp16' is not one of 'own', 'bf16', 'int8', 'int4', 'powersgd'.",
    "bench --model gpt-9": "model 'gpt-9' is unknown: did you mean",
    "bench --steps many": "'many' is not a valid integer",
    "bench --seq-len 257": "seq_len 257 exceeds the 256 positions of gpt-5m",
    "bench --model nowhere.at_all:tiny": "no module 'nowhere' here or on the Python path",
    "bench --staeg 2": "No such option",
    "bench extra": "File 'extra' does not exist",
    # Sweeps.
    "bench --stage 1,4": "'4' is not one of '0', '1', '2', '3'",
    "bench --stage 1,,2": "'1,,2' has an empty value between its commas",
    "bench --engine zerokit,dpp": "'dpp' is not one of 'zerokit', 'ddp'",
    "bench --model gpt-5m,gtp-34m": "model 'gtp-34m' is unknown: did you mean gpt-34m",
    "bench --stage 1,2 --save run": "checkpoints belong to one bench",
    "bench --stage 1,2 --output x.json": "a sweep needs a folder: --output x.json names a file",
    "bench --continue nowhere": "nowhere does not exist; give the folder of a sweep",
    "bench --data nowhere": "data: nowhere does not exist",
    "bench --stage 1,2 --baseline 3": "--baseline '3' is no cell of this sweep: choose one of 'zerokit 1', 'zerokit 2'",
    "bench --continue x --stage 1": "--stage cannot be combined with --continue",
    "bench --continue x --no-twin": "--twin cannot be combined with --continue",
    # Elastic benches.
    "bench --elastic": "give a run directory with --save",
    "bench --elastic --save run --stage 1,2": "without a sweep",
    "bench --save ''": "save is empty: give a value, or leave the option out",
    "bench --experiment ''": "experiment is empty: give a name, or leave the option out",
    "bench --max-restarts 2": "--max-restarts is for --elastic with ranks on this machine",
    "bench --elastic --save run --launcher ssh --hosts a": "not work with ssh",
    "bench --elastic --save run --engine ddp": "--save writes zerokit's checkpoints",
    # Launchers.
    "bench --launcher ssh": "give --hosts a,b or --hostfile FILE",
    "bench --launcher ssh --hosts a,,b": "--hosts a,,b is not a list of hosts",
    "bench --launcher ssh --hosts -oProxyCommand=x": "is not a list of hosts",
    "bench --launcher ssh --hosts 'a,b, a'": "--hosts a,b, a names a twice",
    """bench --launcher ssh --hosts a --ssh-option "-p '22" """: "--ssh-option -p '22: No closing quotation",
    "bench --launcher ssh --hostfile missing": "the hostfile missing cannot be read",
    "bench --launcher ssh --hosts a --partition x": "--partition is for --launcher slurm, not for ssh",
    "bench --launcher ssh --hosts a,b --nodes 3": "--nodes 3 needs that many hosts, but there are 2: a, b",
    "bench --hosts a,b": "--hosts is for --launcher ssh, not for local",
    "bench --time 1": "--time is for --launcher slurm, not for local",
    "bench --env A=1": "--env is for --launcher ssh or slurm or kubernetes, not for local",
    "bench --launcher env": "no variables of torchrun, srun, mpirun or a TrainJob are set",
    "bench --launcher kubernetes --container-image i --save /runs/a": "--pvc CLAIM",
    "bench --launcher kubernetes --container-image i --timeline t.json": "--timeline would be lost with its pod",
    "bench --engine ddp,fsdp2 --timeline t.json": "zerokit's engine, and ddp has none",
    "bench --timeline .": "--timeline . is a folder: give the name of a file, such as step.json.gz",
    "bench --launcher kubernetes --container-image i --tracking-uri http://me:pass@tracker": (
        "the password in MLFLOW_TRACKING_URI would appear in the manifest"
    ),
    "bench --launcher kubernetes --container-image i --node-selector gpu": "expected KEY=VALUE",
    "bench --launcher kubernetes --container-image i --resource rdma": "--resource rdma: expected KEY=VALUE",
    "bench --launcher kubernetes --container-image i --mem 64GB": "memory '64GB' is no quantity of Kubernetes",
    "bench --launcher kubernetes --container-image i --env HF_TOKEN=x": "the password in HF_TOKEN",
    "bench --launcher slurm --env NO_SUCH_VARIABLE": "give it as NO_SUCH_VARIABLE=VALUE",
    "bench --launcher slurm --dry-run --partition 'a b'": "cannot be written in a line of a batch script",
    "bench --launcher slurm --continue x": "inside an allocation",
    "bench --launcher slurm --nodes 1,3 --dry-run": "fixed number of nodes",
    "bench --launcher slurm --dry-run --follow": "a job's output is in its log",
    "bench --launcher slurm --dry-run --env HF_TOKEN=x": "the password in HF_TOKEN would appear in the batch",
    "bench --launcher slurm --dry-run --tracking-uri http://me:pass@tracker": "the password in the command would",
    # Other commands.
    "bnech": "No such command 'bnech'. Did you mean bench?",
    "compare": "at least one RUN",
    "compare nothing.json": "no such file or folder",
    "compare nothing": "'nothing' is not a file or folder",
    "plan nowhere/config.json --gpus 2 --device h100-80": "nowhere/config.json is not a model configuration",
    "plan gpt-tiny --gpus 2 --from nowhere": "Path 'nowhere' does not exist.",
    "plan gpt-tiny --gpus 2 --cluster nowhere": "Path 'nowhere' does not exist.",
    "compare old.json --fail-on step/p50:3": "did you mean step/p50_ms",
    "compare old.json --fail-on 3%": "not METRIC:PERCENT",
    "compare old.json --fail-on step/p50_ms:-3%": "not METRIC:PERCENT",
    "compare old.json --fail-on step/p50_ms:nan": "not METRIC:PERCENT",
    "compare old.json --fail-on xyzzy:3%": "one of step/p50_ms",
    "compare old.json --metric step": "there is no metric 'step'",
    "doctor --quick --pairs": "--pairs needs ranks, and --quick starts none",
    "doctor --pairs": "--pairs compares nodes, and there is only one: give --nodes 2 or more",
    "doctor --nodes 0": "0 is not in the range x>=1.",
    "doctor --timeout 0": "0.0 is not in the range 0<x<=1000000.0.",
    "doctor --timeout nan": "'nan' is not a finite number.",
    "compare old.json --losses-agree nan": "'nan' is not a finite number.",
    "doctor a b": "Got unexpected extra argument (b)",
    "plan tests.planning.models:branching --gpus 8 --device h100-80": "the model cannot be traced",
    "plan gpt-tiny --gpus 8 --device h900": "device 'h900' is unknown: choose one of a100-40",
    "plan gpt-tiny --gpus 8 --device h100-80 --samples-per-step 9": "9 samples in a step are no multiple of 8",
    "push": "Missing argument",
    "push nowhere": "nowhere does not exist",
    "push ''": "the path is empty.",
    "push empty": "has no record",
}


@pytest.mark.parametrize("line", REFUSED)
def test_wrong_use_is_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.chdir(tmp_path)
    write_record(make_cell(), tmp_path / "old.json")
    (tmp_path / "empty").mkdir()
    done = CliRunner().invoke(cli, shlex.split(line))
    assert done.exit_code == 2, done.output
    assert REFUSED[line] in " ".join(done.stderr.replace("│", " ").split())
    assert done.stdout == ""
    assert {path.name for path in tmp_path.iterdir()} == {"old.json", "empty"}
