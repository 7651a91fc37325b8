"""Nodes as pods: a Kubeflow TrainJob, or a JobSet by itself, in which every pod runs `zerokit bench` as one node.

Sources: https://www.kubeflow.org/docs/components/trainer/ (the runtime `torch-distributed` sets torchrun's PET_
variables), https://jobset.sigs.k8s.io/docs/concepts/ (names of pods). The bench's options travel in a ConfigMap; the
record is read from the log of node 0, where `--json` prints it.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from zerokit.errors import UsageError
from zerokit.launch.failures import LaunchError
from zerokit.launch.interrupts import Interrupted, Interrupts
from zerokit.launch.membership import DEFAULT_PORT

FORMS = ("trainjob", "jobset")
_ARGUMENTS = "ZEROKIT_BENCH_ARGUMENTS"
_KEY = "bench.json"
_NODE = "node"
_FOLLOW_SECONDS = 2.0
_LABEL = "zerokit-bench"


@dataclass(frozen=True, slots=True)
class Pods:
    """A request to Kubernetes.

    Attributes:
        name: of everything that is made; a DNS label.
        namespace: where.
        image: with zerokit, its entry point `zerokit`.
        nodes: pods.
        nproc_per_node: ranks of each.
        gpus_per_node: NVIDIA GPUs of each; None asks for none.
        arguments: of `zerokit bench`.
        environment: further variables of the ranks.
    """

    name: str
    namespace: str
    image: str
    nodes: int
    nproc_per_node: int
    arguments: Sequence[str]
    gpus_per_node: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for what, value in (("name", self.name), ("namespace", self.namespace)):
            if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?", value):
                raise UsageError(
                    f"the {what} {value!r} is no DNS label: small letters, digits and '-', at most 52 of them"
                )


def render(pods: Pods, form: str) -> list[dict[str, Any]]:
    """The objects to create, in order: the ConfigMap with the options, then the job in this form."""
    settings = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(pods),
        "data": {_KEY: json.dumps(list(pods.arguments))},
    }
    return [settings, _train_job(pods) if form == "trainjob" else _job_set(pods)]


def to_yaml(objects: Sequence[Mapping[str, Any]]) -> str:
    """The objects as kubectl reads them."""
    return yaml.safe_dump_all(objects, sort_keys=False, default_flow_style=False)


def _metadata(pods: Pods) -> dict[str, Any]:
    return {"name": pods.name, "namespace": pods.namespace, "labels": {"app.kubernetes.io/name": _LABEL}}


def _variables(pods: Pods) -> list[dict[str, Any]]:
    options = {"configMapKeyRef": {"name": pods.name, "key": _KEY}}
    return [
        {"name": _ARGUMENTS, "valueFrom": options},
        *({"name": name, "value": value} for name, value in pods.environment.items()),
    ]


def _resources(pods: Pods) -> dict[str, Any]:
    return {"limits": {"nvidia.com/gpu": str(pods.gpus_per_node)}} if pods.gpus_per_node else {}


_ARGS = ["bench", "--launcher", "env", "--json", "--arguments", f"env:{_ARGUMENTS}"]


def _train_job(pods: Pods) -> dict[str, Any]:
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(pods),
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": pods.image,
                "numNodes": pods.nodes,
                "numProcPerNode": pods.nproc_per_node,
                "command": ["zerokit"],
                "args": _ARGS,
                "env": _variables(pods),
                **({"resourcesPerNode": resources} if (resources := _resources(pods)) else {}),
            },
        },
    }


def _job_set(pods: Pods) -> dict[str, Any]:
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    container = {
        "name": _NODE,
        "image": pods.image,
        "command": ["zerokit"],
        "args": _ARGS,
        "env": [
            {"name": "PET_NNODES", "value": str(pods.nodes)},
            {"name": "PET_NPROC_PER_NODE", "value": str(pods.nproc_per_node)},
            {"name": "PET_NODE_RANK", "valueFrom": index},
            {"name": "PET_MASTER_ADDR", "value": f"{pods.name}-{_NODE}-0-0.{pods.name}"},
            {"name": "PET_MASTER_PORT", "value": str(DEFAULT_PORT)},
            *_variables(pods),
        ],
        **({"resources": resources} if (resources := _resources(pods)) else {}),
        # Ranks of a pod share memory; the default of 64 MiB is too little.
        "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
    }
    pod = {
        "restartPolicy": "Never",  # a benchmark that begins anew is another measurement
        "containers": [container],
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
    }
    job = {
        "completionMode": "Indexed",
        "completions": pods.nodes,
        "parallelism": pods.nodes,
        "backoffLimit": 0,
        "template": {"metadata": {"labels": {"app.kubernetes.io/name": _LABEL}}, "spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(pods),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [{"name": _NODE, "replicas": 1, "template": {"spec": job}}],
        },
    }


def apply(objects: Sequence[Mapping[str, Any]]) -> None:
    """Hand them to kubectl; raises `LaunchError` with what it said."""
    _kubectl(["create", "-f", "-"], to_yaml(objects))


def follow(pods: Pods, form: str, interrupts: Interrupts, show: Callable[[str], None]) -> str:
    """Wait for the job's end; returns the log of node 0.

    Raises:
        LaunchError: the job failed; the message has the end of node 0's log.
        Interrupted: SIGINT or SIGTERM came; the job was deleted.
    """
    shown = ""
    try:
        while (state := _state(pods, form)) not in ("Complete", "Completed", "Failed"):
            if state != shown:
                show(f"{form} {pods.name}: {state.lower()}")
                shown = state
            deadline = time.monotonic() + _FOLLOW_SECONDS
            while time.monotonic() < deadline:
                interrupts.check()
                time.sleep(0.05)
    except Interrupted:
        delete(pods, form)
        raise
    log = _log(pods)
    if state == "Failed":
        end = "\n".join(f"  | {line}" for line in log.splitlines()[-20:])
        raise LaunchError(f"{form} {pods.name} failed; the end of node 0's log:\n{end}")
    return log


def delete(pods: Pods, form: str) -> None:
    """Remove the job and its options."""
    _kubectl(["delete", "--ignore-not-found", "--wait=false", "-n", pods.namespace, f"{form}/{pods.name}"])
    _kubectl(["delete", "--ignore-not-found", "--wait=false", "-n", pods.namespace, f"configmap/{pods.name}"])


def find_json(log: str) -> str:
    """The last JSON document that begins and ends a line of the log, between lines of other output.

    Raises `LaunchError` if there is none.
    """
    lines = log.splitlines()
    for end in range(len(lines) - 1, -1, -1):
        if lines[end] != "}":
            continue
        for begin in range(end - 1, -1, -1):
            if lines[begin] == "{":
                text = "\n".join(lines[begin : end + 1])
                try:
                    json.loads(text)
                except ValueError:
                    continue
                return text
    raise LaunchError("node 0's log holds no record: its end is\n" + "\n".join(lines[-20:]))


def _state(pods: Pods, form: str) -> str:
    text = _kubectl(["get", f"{form}/{pods.name}", "-n", pods.namespace, "-o", "json"])
    status = json.loads(text).get("status", {})
    true = [one["type"] for one in status.get("conditions", []) if one.get("status") == "True"]
    return next(
        (kind for kind in ("Failed", "Complete", "Completed") if kind in true),
        true[-1] if true else "Waiting",
    )


def _log(pods: Pods) -> str:
    """Of the pod with index 0: a JobSet of that name runs it in either form."""
    label = f"jobset.sigs.k8s.io/jobset-name={pods.name},batch.kubernetes.io/job-completion-index=0"
    return _kubectl(["logs", "-n", pods.namespace, "-l", label, "--tail=-1", "--prefix=false"])


def _kubectl(words: Sequence[str], given: str | None = None) -> str:
    try:
        done = subprocess.run(["kubectl", *words], input=given, capture_output=True, text=True, check=False)
    except OSError as error:
        raise LaunchError(
            f"kubectl cannot be run ({error.strerror}): install it, or pipe the objects to one"
        ) from error
    if done.returncode != 0:
        raise LaunchError(f"kubectl {' '.join(words[:2])} failed: {done.stderr.strip()}")
    return done.stdout
