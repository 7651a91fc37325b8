"""JobSets, checked against the model that Kubeflow makes of their definition."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kubeflow_trainer_api import models


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Every leaf by its path: what a model drops or changes is missing or other."""
    if isinstance(value, dict):
        return {k: v for key, one in value.items() for k, v in _leaves(one, f"{path}.{key}").items()}
    if isinstance(value, list):
        return {k: v for at, one in enumerate(value) for k, v in _leaves(one, f"{path}[{at}]").items()}
    return {path: value}


def require_known(made: Mapping[str, Any]) -> None:
    """The model drops fields that it does not know: every leaf must come back."""
    known = models.JobsetV1alpha2JobSet.from_dict(dict(made))
    assert known is not None
    assert _leaves(known.to_dict()) == _leaves(made), made["kind"]
