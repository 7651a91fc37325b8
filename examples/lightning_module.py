"""A LightningModule, trained with its parameters, gradients and optimizer states divided over the ranks.

torchrun --nproc-per-node 2 examples/lightning_module.py  (needs lightning or pytorch-lightning)
"""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zerokit.integrations.lightning import ZeroStrategy

try:
    import lightning.pytorch as pl
except ImportError:
    import pytorch_lightning as pl

RUN = Path("runs/lightning_module")


class Regression(pl.LightningModule):
    """Nothing in here knows of zerokit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)))

    def training_step(self, batch: list[Tensor], number: int) -> Tensor:
        x, y = batch
        loss = nn.functional.mse_loss(self.blocks(x).float(), y)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: list[Tensor], number: int) -> None:
        x, y = batch
        self.log("validated", nn.functional.mse_loss(self.blocks(x).float(), y), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)]


def data(seed: int, count: int) -> DataLoader[tuple[Tensor, ...]]:
    """Batches of vectors, and what is to be learnt of each: its neighbours, squashed."""
    x = torch.randn(count, 32, generator=torch.Generator().manual_seed(seed))
    return DataLoader(TensorDataset(x, x.roll(1, dims=1).tanh()), batch_size=16)


def main() -> None:
    """Train for four epochs; then let another Trainer go on from the best of them."""
    pl.seed_everything(0, verbose=False)
    if os.environ.get("RANK", "0") == "0":
        shutil.rmtree(RUN, ignore_errors=True)
    world = int(os.environ["WORLD_SIZE"])

    def trainer(epochs: int) -> Any:
        # The strategy is the only change. Clipping, accumulation and precision are the Trainer's own arguments.
        return pl.Trainer(
            strategy=ZeroStrategy(stage=3),
            accelerator="auto" if torch.cuda.is_available() else "cpu",
            devices=world,
            precision="bf16-mixed",
            gradient_clip_val=1.0,
            accumulate_grad_batches=2,
            max_epochs=epochs,
            callbacks=[pl.callbacks.ModelCheckpoint(RUN, monitor="validated", filename="best")],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    first = trainer(epochs=4)
    first.fit(Regression(), data(0, 512), data(1, 64))
    best = first.checkpoint_callback.best_model_path
    first.print(f"after 4 epochs: validated {float(first.callback_metrics['validated']):.4f}")

    # The checkpoint is a directory of zerokit's: any number of ranks can go on from it, at any stage.
    second = trainer(epochs=6)
    second.fit(Regression(), data(0, 512), data(1, 64), ckpt_path=best)
    second.print(f"after 6 epochs: validated {float(second.callback_metrics['validated']):.4f}")
    second.print(f"saved {Path(best).relative_to(Path.cwd())}; steps {second.global_step}")


if __name__ == "__main__":
    main()
