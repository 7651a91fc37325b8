"""The matrices of a model's blocks, which Muon trains, and the blocks themselves."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn


def trainable(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The parameters that are not frozen."""
    return [parameter for parameter in parameters if parameter.requires_grad]


def outermost_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """The children of every outermost ModuleList: the layers of a transformer, the stages of a ResNet."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from outermost_blocks(child)


def matrices_of(model: nn.Module) -> list[nn.Parameter]:
    """The trainable two-dimensional weights of the model's blocks that are no embedding's, in order."""
    embedded = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    inside = {
        id(parameter): parameter for block in outermost_blocks(model) for parameter in block.parameters()
    }
    return [
        parameter
        for parameter in trainable(inside.values())
        if parameter.ndim == 2 and id(parameter) not in embedded
    ]
