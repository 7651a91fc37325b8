"""Nodes as pods: a Kubeflow TrainJob, or a JobSet by itself, in which every pod runs torchrun as one node.

Sources: https://www.kubeflow.org/docs/components/trainer/ (a runtime with `torch` sets torchrun's PET_ variables),
https://jobset.sigs.k8s.io/docs/concepts/ (names of pods),
https://kubernetes.io/docs/concepts/security/pod-security-standards/ ("restricted", which the pods keep to). Kubeflow's
own runtime `torch-distributed` has neither shared memory nor a volume, so a TrainJob comes with one.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import yaml

from zerokit.documents import parse_json
from zerokit.errors import UsageError
from zerokit.interrupts import Interrupted, Interrupts
from zerokit.launch.failures import LaunchError, quote_tail
from zerokit.submit.jobs import Job, NoAnswer, State, ask, await_end

_NODE = "node"
_PORT = 29500
"""torchrun's default."""
_MOST_BYTES = 2**20
"""The limit of a ConfigMap: https://kubernetes.io/docs/concepts/configuration/configmap/."""
_QUEUE = "kueue.x-k8s.io/queue-name"  # https://kueue.sigs.k8s.io/docs/tasks/run/
_FORWARDED = re.compile(r"(ZEROKIT|NCCL|GLOO|OMP)_\w+")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|[kMGTPE]|[KMGTPE]i)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pods(Job):
    """A request to Kubernetes: a pod for each node. Quantities are written as Kubernetes does: "500m", "64Gi".

    Attributes:
        name: of everything that is made; a DNS label.
        image: with zerokit; its user is `_USER`.
        torchrun: the words after it: the program of the ranks.
        files: of the program, text by name, which pods find in `PROGRAM`; they and the job are at most 1 MiB.
        application: what the job is, as a label.
        namespace, service_account, priority_class, pull_secrets: as Kubernetes calls them.
        queue: Kueue's local queue.
        shared_memory: the most that ranks of a pod may put into /dev/shm; None is half of the node's memory.
        resources: further ones of each as NAME=N, such as those of a device plugin for RDMA.
        capabilities: of the container, such as IPC_LOCK; with any, pods do not keep to "restricted".
        secrets: Secrets whose entries are variables of the ranks, too.
        claim: a PersistentVolumeClaim for what ranks write below `RUNS`; None keeps it while the pod lives.
        node_selector: labels that nodes must have, as KEY=VALUE.
        tolerations: taints that they may have, as kubectl writes them: KEY[=VALUE]:EFFECT.
    """

    name: str
    image: str
    torchrun: Sequence[str]
    files: Mapping[str, str] = field(default_factory=dict)
    application: str = "zerokit-bench"
    namespace: str = "default"
    secrets: Sequence[str] = ()
    claim: str | None = None
    node_selector: Sequence[str] = ()
    tolerations: Sequence[str] = ()
    service_account: str | None = None
    pull_secrets: Sequence[str] = ()
    shared_memory: str | None = None
    resources: Sequence[str] = ()
    capabilities: Sequence[str] = ()
    queue: str | None = None
    priority_class: str | None = None

    def __post_init__(self) -> None:
        for text in self.tolerations:
            if not re.fullmatch(r"[^=:]+(=[^=:]+)?:(NoSchedule|PreferNoSchedule|NoExecute)", text):
                raise UsageError(
                    f"toleration {text!r}: expected KEY=VALUE:EFFECT or KEY:EFFECT, like gpu:NoSchedule"
                )
        _pairs("--node-selector", self.node_selector)
        own = {"memory": self.memory, "shared memory": self.shared_memory}
        asked = {**own, **_pairs("--resource", self.resources)}
        for what, quantity in asked.items():
            if quantity is not None and not _QUANTITY.fullmatch(quantity):
                raise UsageError(
                    f"{what} {quantity!r} is no quantity of Kubernetes: expected such as 8, 500m or 64Gi"
                )
        for what, value in (("name", self.name), ("namespace", self.namespace)):
            if not re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,50}[a-z0-9])?", value):
                raise UsageError(
                    f"the {what} {value!r} is not a DNS label: use lower-case letters, digits and '-', at most 52 "
                    "characters"
                )
        for name in self.files:
            if not re.fullmatch(r"[\w.-]+", name, re.ASCII):
                raise UsageError(
                    f"Kubernetes takes no file named {name!r}: use letters, digits, '-', '_' and '.', or put it in the "
                    "image"
                )
        if sum(len(text.encode()) for text in self.files.values()) > _MOST_BYTES:
            raise UsageError(
                f"Kubernetes takes at most 1 MiB of files, but {', '.join(self.files)} is larger: put it in the image"
            )
        self.refuse_secrets(
            self.torchrun,
            "manifest",
            "put it in a Secret (for MLflow as MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD) and pass it "
            "with --env-from",
        )


def _pairs(option: str, given: Sequence[str]) -> dict[str, str]:
    """Raises `UsageError`, which names the option, for a text that is not KEY=VALUE."""
    pairs = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise UsageError(f"{option} {text}: expected KEY=VALUE")
        pairs[key] = value
    return pairs


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of this process that pods get; others name files of this machine, or are secrets."""
    return {name: value for name, value in environment.items() if _FORWARDED.fullmatch(name)}


def render(pods: Pods, form: str) -> list[dict[str, Any]]:
    """The objects to create, in order: the program's files, a TrainJob's runtime, and the job."""
    files = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _metadata(pods), "data": dict(pods.files)}
    # The TrainJob's webhook looks for its runtime.
    job = [_job_set(pods)] if form == "jobset" else [_runtime(pods), _train_job(pods)]
    return [files, *job] if pods.files else job


def to_yaml(objects: Sequence[Mapping[str, Any]]) -> str:
    """The objects in the form that kubectl reads."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, default_flow_style=False)


class _Dumper(yaml.SafeDumper):
    """Texts of several lines as they are."""


_Dumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def _metadata(pods: Pods, **labels: str | None) -> dict[str, Any]:
    named = _given(**{"app.kubernetes.io/name": pods.application}, **labels)
    return {"name": pods.name, "namespace": pods.namespace, "labels": named}


def _verbatim(text: str) -> str:
    """The text as written where Kubernetes would replace $(NAME) and $$."""
    return text.replace("$", "$$")


def _torchrun(pods: Pods, variables: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """The command of a container, with these variables beside the ranks' own."""
    own = [{"name": name, "value": _verbatim(value)} for name, value in pods.variables.items()]
    words = [_verbatim(word) for word in pods.torchrun]
    return {"command": ["torchrun"], "args": words, **_given(env=[*variables, *own])}


def _given(**fields: Any) -> dict[str, Any]:
    """The fields that are not empty."""
    return {name: value for name, value in fields.items() if value}


def _resources(pods: Pods) -> dict[str, Any]:
    # A device's request is its limit; of cores and memory there is no limit, which would throttle a measurement.
    limits = {"nvidia.com/gpu": str(pods.gpus_per_node)} if pods.gpus_per_node else {}
    cpus = str(pods.cpus_per_task * pods.ranks) if pods.cpus_per_task else None
    limits |= _pairs("--resource", pods.resources)
    return _given(limits=limits, requests=_given(cpu=cpus, memory=pods.memory))


RUNS, PROGRAM = "/runs", "/program"
"""Where ranks may write, which is the image's working directory, and where they find a program's files."""
_USER = 10001
"""The image's (docker/Dockerfile)."""


def _pod(pods: Pods, container: Mapping[str, Any]) -> dict[str, Any]:
    """A pod of either form. All that ranks write goes to three volumes: the image's own files cannot change."""
    runs: dict[str, Any] = (
        {"persistentVolumeClaim": {"claimName": pods.claim}} if pods.claim else {"emptyDir": {}}
    )
    # Ranks of a pod share memory; the default of 64 MiB is too little.
    shared = {"medium": "Memory", **_given(sizeLimit=pods.shared_memory)}
    volumes: dict[str, tuple[str, dict[str, Any]]] = {"tmp": ("/tmp", {"emptyDir": {}}), "runs": (RUNS, runs)}
    volumes["shared-memory"] = ("/dev/shm", {"emptyDir": shared})
    if pods.files:
        volumes["program"] = (PROGRAM, {"configMap": {"name": pods.name}})
    return {
        "restartPolicy": "Never",  # a benchmark that begins anew is another measurement
        "terminationGracePeriodSeconds": 60,  # to end the ranks, to write the record and to tell MLflow
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": _USER,
            "fsGroup": _USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {
                "name": _NODE,
                "image": pods.image,
                **container,
                **_given(envFrom=[{"secretRef": {"name": one}} for one in pods.secrets]),
                "securityContext": {
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"], **_given(add=list(pods.capabilities))},
                },
                "volumeMounts": [{"name": name, "mountPath": path} for name, (path, _) in volumes.items()],
            }
        ],
        "volumes": [{"name": name, **source} for name, (_, source) in volumes.items()],
        **_given(
            nodeSelector=_pairs("--node-selector", pods.node_selector),
            tolerations=[_toleration(one) for one in pods.tolerations],
            serviceAccountName=pods.service_account,
            priorityClassName=pods.priority_class,
            imagePullSecrets=[{"name": one} for one in pods.pull_secrets],
        ),
    }


def _toleration(text: str) -> dict[str, str]:
    taint, _, effect = text.rpartition(":")
    key, equals, value = taint.partition("=")
    rest = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
    return {"key": key, **rest, "effect": effect}


def _runtime(pods: Pods) -> dict[str, Any]:
    job = {
        "name": _NODE,
        "template": {
            "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
            "spec": {"template": {"spec": _pod(pods, {})}},
        },
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": _metadata(pods, **{"trainer.kubeflow.org/framework": "torch"}),
        "spec": {
            "mlPolicy": {"numNodes": pods.nodes, "torch": {}},
            "template": {"spec": {"failurePolicy": {"maxRestarts": 0}, "replicatedJobs": [job]}},
        },
    }


def _train_job(pods: Pods) -> dict[str, Any]:
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _metadata(pods, **{_QUEUE: pods.queue}),
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": pods.name},
            "trainer": {
                "image": pods.image,
                "numNodes": pods.nodes,
                "numProcPerNode": pods.ranks,
                **_torchrun(pods),
                **_given(resourcesPerNode=_resources(pods)),
            },
        },
    }


def _job_set(pods: Pods) -> dict[str, Any]:
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    variables: list[dict[str, Any]] = [
        {"name": "PET_NNODES", "value": str(pods.nodes)},
        {"name": "PET_NPROC_PER_NODE", "value": str(pods.ranks)},
        {"name": "PET_NODE_RANK", "valueFrom": index},
        {"name": "PET_MASTER_ADDR", "value": f"{pods.name}-{_NODE}-0-0.{pods.name}"},
        {"name": "PET_MASTER_PORT", "value": str(_PORT)},
    ]
    container = _torchrun(pods, variables) | _given(resources=_resources(pods))
    job = {
        "completionMode": "Indexed",
        "completions": pods.nodes,
        "parallelism": pods.nodes,
        "backoffLimit": 0,
        "template": {
            "metadata": {"labels": {"app.kubernetes.io/name": pods.application}},
            "spec": _pod(pods, container),
        },
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _metadata(pods, **{_QUEUE: pods.queue}),
        "spec": {
            # Ranks look the first node up before it is ready.
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": 0},
            "replicatedJobs": [{"name": _NODE, "replicas": 1, "template": {"spec": job}}],
        },
    }


def apply(objects: Sequence[Mapping[str, Any]]) -> None:
    """Create the objects with kubectl; raises `LaunchError` with its message."""
    _kubectl("create", "-f", "-", given=to_yaml(objects))


def follow(pods: Pods, form: str, interrupts: Interrupts, show: Callable[[str], None]) -> tuple[str, bool]:
    """Wait until the job ends; returns the log of node 0, and whether the job succeeded.

    Raises `Interrupted` after SIGINT or SIGTERM; what `render` has made was deleted.
    """
    job = f"{form}/{pods.name}"

    def asked(*words: str) -> str:
        words = (*words, "-n", pods.namespace)
        return ask(partial(_kubectl, *words), interrupts, f"kubectl {' '.join(words)}")

    try:
        last = await_end(lambda: _state(asked("get", job, "-o", "json")), interrupts, f"{job}: ", show)
    except Interrupted:
        _kubectl("delete", "--ignore-not-found", "--wait=false", "-f", "-", given=to_yaml(render(pods, form)))
        raise
    # The pod with index 0: a JobSet of that name runs it in either form.
    label = f"jobset.sigs.k8s.io/jobset-name={pods.name},batch.kubernetes.io/job-completion-index=0"
    return asked("logs", "-l", label, "--tail=-1", "--prefix=false"), last.text != "failed"


def find_json(log: str) -> str:
    """The last JSON document in the log that starts with a line of its own; raises `LaunchError` if there is none."""
    for begin in reversed([match.start() for match in re.finditer("^{$", log, re.MULTILINE)]):
        with contextlib.suppress(ValueError, RecursionError):
            _, end = json.JSONDecoder().raw_decode(log, begin)
            return log[begin:end]
    raise LaunchError(f"node 0's log has no record; it ends with\n{quote_tail(log)}")


def _state(text: str) -> State:
    try:
        status = parse_json(text).get("status", {})
    except (ValueError, AttributeError) as error:
        raise LaunchError(f"kubectl has printed no object: {error}") from error
    true = [one["type"] for one in status.get("conditions", []) if one.get("status") == "True"]
    ends = [kind for kind in ("Failed", "Complete", "Completed") if kind in true]
    return State((ends or true[-1:] or ["Waiting"])[0].lower(), bool(ends))


def _kubectl(*words: str, given: str | None = None) -> str:
    """What kubectl prints; raises `NoAnswer` with its message where asking again may help."""
    try:
        done = subprocess.run(["kubectl", *words], input=given, capture_output=True, text=True, check=False)
    except OSError as error:
        raise LaunchError(
            f"kubectl cannot be run ({error.strerror}): install it, or pipe the objects to one"
        ) from error
    if done.returncode != 0:
        kind = LaunchError if "NotFound" in done.stderr else NoAnswer
        raise kind(f"kubectl {' '.join(words[:2])} failed: {done.stderr.strip()}")
    return done.stdout
