"""The two smallest models: a linear regression, and one hidden layer over the pixels of an image."""

from __future__ import annotations

import math

import torch.nn.functional as F
from torch import Tensor, nn

from zerokit.bench.catalogue.sizes import LinearConfig, MLPConfig
from zerokit.bench.workloads.initialise import init_model, name_modules, set_std


class Linear(nn.Module):
    """A linear regression."""

    def __init__(self, config: LinearConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.linear = nn.Linear(config.features, 1)
        name_modules(self, seed)
        init_model(self)

    def forward(self, features: Tensor, targets: Tensor) -> Tensor:
        """The mean squared error in fp32; features (batch, features), targets (batch,)."""
        return F.mse_loss(self.linear(features).squeeze(1).float(), targets.float())


class MLP(nn.Module):
    """Pixels, a hidden layer with ReLU, classes."""

    def __init__(self, config: MLPConfig, *, seed: int = 0) -> None:
        super().__init__()
        self.hidden = nn.Linear(config.channels * config.image_size**2, config.hidden)
        self.out = nn.Linear(config.hidden, config.classes)
        set_std(self.hidden, math.sqrt(2.0 / self.hidden.in_features))
        set_std(self.out, math.sqrt(1.0 / self.out.in_features))
        name_modules(self, seed)
        init_model(self)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The mean cross-entropy in fp32; images (batch, channels, size, size), labels (batch,)."""
        logits = self.out(F.relu(self.hidden(images.flatten(1))))
        return F.cross_entropy(logits.float(), labels)
