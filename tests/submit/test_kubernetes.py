"""Objects for Kubernetes, checked against Kubeflow's own models, and kubectl's part with a program in its place."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.submit.manifests import require_known
from tests.support.programs import Programs
from zerokit.errors import UsageError
from zerokit.interrupts import Interrupted, Interrupts
from zerokit.launch.failures import LaunchError
from zerokit.submit import jobs
from zerokit.submit.kubernetes import Pods, apply, find_json, follow, render, to_yaml

PODS = Pods(
    name="zerokit-1",
    namespace="team",
    image="registry.example/zerokit:1",
    nodes=2,
    ranks=8,
    torchrun=["--no-python", "zerokit", "bench", "--model", "$(x):y"],
    gpus_per_node=8,
    variables={"NCCL_DEBUG": "$(x)$$"},
    secrets=["tracker"],
    claim="runs",
    node_selector=["gpu=h100"],
    tolerations=["nvidia.com/gpu:NoSchedule", "team=us:NoExecute"],
    service_account="bench",
    pull_secrets=["registry"],
    cpus_per_task=8,
    memory="256Gi",
    shared_memory="16Gi",
    resources=["rdma/hca=1"],
    queue="team-a",
    priority_class="high",
)
BARE: dict[str, Any] = {"name": "a", "image": "image", "nodes": 1, "torchrun": ["train.py"]}


def pod_of(pods: Pods, form: str) -> dict[str, Any]:
    """The pod's specification, once Kubeflow's or JobSet's models know every field of all objects."""
    made = {one["kind"]: one for one in yaml.safe_load_all(to_yaml(render(pods, form)))}
    for one in made.values():
        require_known(one)
    spec = made["JobSet"]["spec"] if form == "jobset" else made["TrainingRuntime"]["spec"]["template"]["spec"]
    pod: dict[str, Any] = spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    return pod


@pytest.mark.parametrize("form", ["trainjob", "jobset"])
def test_pods_keep_to_the_restricted_standard(form: str) -> None:
    """Rule by rule: https://kubernetes.io/docs/concepts/security/pod-security-standards/."""
    pod = pod_of(PODS, form)
    (container,) = pod["containers"]
    assert {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & pod.keys() == set()
    assert not any("hostPort" in port for port in container.get("ports", ()))
    kinds = {kind for volume in pod["volumes"] for kind in volume if kind != "name"}
    allowed = "configMap csi downwardAPI emptyDir ephemeral persistentVolumeClaim projected secret"
    assert kinds <= set(allowed.split())
    own, around = container["securityContext"], pod["securityContext"]
    assert own["allowPrivilegeEscalation"] is False
    assert "privileged" not in own
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert around["runAsNonRoot"] is True
    assert around["runAsUser"] != 0
    assert around["seccompProfile"] == {"type": "RuntimeDefault"}
    assert {"seLinuxOptions", "sysctls", "appArmorProfile"} & around.keys() == set()


@pytest.mark.parametrize("form", ["trainjob", "jobset"])
def test_pods_have_what_was_asked_for(form: str) -> None:
    pod = pod_of(PODS, form)
    (container,) = pod["containers"]
    volumes = {one["name"]: one for one in pod["volumes"]}
    mounted = {one["mountPath"]: volumes[one["name"]] for one in container["volumeMounts"]}
    assert mounted["/dev/shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "16Gi"}
    assert mounted["/runs"]["persistentVolumeClaim"] == {"claimName": "runs"}
    assert "/tmp" in mounted
    assert container["envFrom"] == [{"secretRef": {"name": "tracker"}}]
    assert pod["nodeSelector"] == {"gpu": "h100"}
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "team", "operator": "Equal", "value": "us", "effect": "NoExecute"},
    ]
    assert pod["serviceAccountName"] == "bench"
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["priorityClassName"] == "high"
    *_, job = render(PODS, form)
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team-a"
    resources = container["resources"] if form == "jobset" else job["spec"]["trainer"]["resourcesPerNode"]
    assert resources == {
        "limits": {"nvidia.com/gpu": "8", "rdma/hca": "1"},
        "requests": {"cpu": "64", "memory": "256Gi"},
    }
    assert '{"name": "NCCL_DEBUG", "value": "$$(x)$$$$"}' in json.dumps(job)
    assert (
        '"command": ["torchrun"], "args": ["--no-python", "zerokit", "bench", "--model", "$$(x):y"]'
        in json.dumps(job)
    )
    bare = pod_of(Pods(**BARE), form)
    options = {"nodeSelector", "tolerations", "serviceAccountName", "imagePullSecrets", "priorityClassName"}
    assert options & bare.keys() == set()
    (locking,) = pod_of(replace(PODS, capabilities=["IPC_LOCK"]), form)["containers"]
    assert locking["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}


def test_names_are_dns_labels_and_tolerations_as_kubectl_writes_taints() -> None:
    for name in ("", "Upper", "a_b", "-a", "a" * 60):
        with pytest.raises(UsageError, match="DNS label"):
            Pods(**BARE | {"name": name})
    for quantity in ("64GB", "-1", "", "a lot"):
        with pytest.raises(UsageError, match="no quantity of Kubernetes"):
            Pods(**BARE, memory=quantity)
    for text in ("gpu", "gpu:Never", "a=b=c:NoSchedule", ":NoSchedule"):
        with pytest.raises(UsageError, match="expected KEY=VALUE:EFFECT"):
            Pods(**BARE, tolerations=[text])


def test_the_record_is_found_between_other_lines() -> None:
    record = {"a": 1, "b": {"c": [1, 2]}}
    log = f"zerokit: leads\n{{broken\n{json.dumps(record, indent=1)}\nafter it\n"
    assert json.loads(find_json(log)) == record
    with pytest.raises(LaunchError, match="has no record"):
        find_json("nothing\n}\n")


@pytest.fixture
def kubectl(tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a `kubectl` that answers from the files `state` and `log`."""
    monkeypatch.setattr(jobs, "FOLLOW_SECONDS", 0.1)
    monkeypatch.chdir(tmp_path)
    once_silent = "get) cat state || { echo {} > state; exit 1; } ;;"
    answers = f"create) cat > created ;; {once_silent} logs) cat log ;; delete) cat > deleted ;; *) exit 1 ;;"
    programs.put("kubectl", f'case "$1" in {answers} esac')
    return tmp_path


def condition(kind: str) -> str:
    return json.dumps({"status": {"conditions": [{"type": kind, "status": "True"}]}})


def test_what_is_created_is_what_was_rendered(kubectl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apply(render(PODS, "trainjob"))
    assert list(yaml.safe_load_all((kubectl / "created").read_text())) == render(PODS, "trainjob")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(LaunchError, match="kubectl cannot be run"):
        apply([])


@pytest.mark.parametrize(("form", "done"), [("trainjob", "Complete"), ("jobset", "Completed")])
def test_a_job_is_followed_to_its_end(kubectl: Path, form: str, done: str) -> None:
    """A question that got no answer is asked again."""
    (kubectl / "log").write_text("the log\n")
    said: list[str] = []

    def show(text: str) -> None:
        said.append(text)
        (kubectl / "state").write_text(condition(done))

    with Interrupts() as interrupts:
        assert follow(PODS, form, interrupts, show) == ("the log\n", True)
        assert said == [f"{form}/zerokit-1: waiting"]
        (kubectl / "state").write_text(condition("Failed"))
        assert follow(PODS, form, interrupts, said.append) == ("the log\n", False)


def test_an_interrupted_job_is_deleted(kubectl: Path) -> None:
    (kubectl / "state").write_text(condition("Running"))
    with Interrupts() as interrupts, pytest.raises(Interrupted):
        follow(PODS, "trainjob", interrupts, lambda text: os.kill(os.getpid(), signal.SIGTERM))
    assert list(yaml.safe_load_all((kubectl / "deleted").read_text())) == render(PODS, "trainjob")
