"""Objects for Kubernetes, checked against the models that Kubeflow and JobSet make of their definitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kubeflow_trainer_api import models

MODELS = {
    "ConfigMap": models.IoK8sApiCoreV1ConfigMap,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "JobSet": models.JobsetV1alpha2JobSet,
}


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Every leaf by its path: what a model drops or changes is missing or other."""
    if isinstance(value, dict):
        return {k: v for key, one in value.items() for k, v in _leaves(one, f"{path}.{key}").items()}
    if isinstance(value, list):
        return {k: v for at, one in enumerate(value) for k, v in _leaves(one, f"{path}[{at}]").items()}
    return {path: value}


def require_known(made: Mapping[str, Any]) -> None:
    """The models drop fields that they do not know: every leaf must come back."""
    known = MODELS[made["kind"]].from_dict(made)
    assert known is not None
    assert _leaves(known.to_dict()) == _leaves(made), made["kind"]
