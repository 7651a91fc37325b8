"""`ZeroStrategy` beside Lightning's own `strategy="ddp"`: losses, norms, steps; checkpoints; what is refused."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, TensorDataset

import zerokit
from tests.integrations.launched import as_launched
from tests.support.distributed import run_ranks
from tests.support.on_ranks import on_ranks

if find_spec("lightning") is None and find_spec("pytorch_lightning") is None:
    pytest.skip("needs lightning or pytorch-lightning", allow_module_level=True)

EPOCHS, BATCHES = 2, 6


def _lightning() -> tuple[Any, Any]:
    """Lightning and our strategy, in an environment as torchrun makes it; imported in the ranks only."""
    as_launched()
    # The process group is there.
    os.environ.update(GROUP_RANK="0", MASTER_PORT="1", TORCHELASTIC_RUN_ID="test")
    # Lightning's own advice: few workers, no logger. What schedulers say of an optimizer that is not theirs counts.
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", message=".*lr_scheduler.*")
    for name in ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    pl = import_module("lightning.pytorch" if find_spec("lightning") is not None else "pytorch_lightning")
    return pl, import_module("zerokit.integrations.lightning").ZeroStrategy


def _module(pl: Any, **changes: Any) -> Any:
    """A module of two groups that reads a parameter outside `forward`; `changes` are methods of its own."""

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)))
            self.head = nn.Linear(16, 4)
            self.scale = nn.Parameter(torch.ones(4))
            self.register_buffer("seen", torch.zeros(()))
            self.losses: list[float] = []
            self.norms: list[float] = []
            self.validated: list[float] = []

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.blocks(x)) * self.scale  # type: ignore[no-any-return]

        def loss(self, batch: Any) -> Tensor:
            x, y = batch
            return nn.functional.mse_loss(self(x).float(), y)

        def training_step(self, batch: Any, number: int) -> Tensor:
            loss = self.loss(batch) + 1e-3 * self.scale.float().square().sum()
            self.seen += 1
            self.losses.append(loss.item())
            self.log("train", loss)
            return loss

        def validation_step(self, batch: Any, number: int) -> None:
            loss = self.loss(batch)
            self.validated.append(loss.item())
            self.log("validated", loss, sync_dist=True)

        test_step = validation_step

        def configure_gradient_clipping(self, optimizer: Any, **options: Any) -> None:
            if not isinstance(optimizer, zerokit.ZeroOptimizer):
                gradients = [p.grad for p in self.parameters() if p.grad is not None]
                self.norms.append(nn.utils.get_total_norm(gradients).item())
            self.clip_gradients(optimizer, **options)
            if isinstance(optimizer, zerokit.ZeroOptimizer) and optimizer.last_norm is not None:
                self.norms.append(optimizer.last_norm)

        def configure_optimizers(self) -> Any:
            groups = [
                {"params": list(self.blocks.parameters()), "lr": 1e-2},
                {"params": [*self.head.parameters(), self.scale], "weight_decay": 0.1},
            ]
            optimizer = torch.optim.AdamW(groups, lr=5e-3)
            parts = [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, 20)]
            schedule = SequentialLR(optimizer, parts, [3])
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    for name, value in changes.items():
        setattr(Net, name, value)
    return Net()


def _data(seed: int, count: int) -> Any:
    """`count` samples; the sampler gives every rank its share, batches are equal for 1, 2 and 3 ranks together."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(count, 16, generator=generator), torch.randn(count, 4, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=12 // dist.get_world_size())


def _trainer(pl: Any, strategy: Any, **options: Any) -> Any:
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary"), False)
    saves = any(isinstance(one, pl.callbacks.ModelCheckpoint) for one in options.get("callbacks", ()))
    options = {"max_epochs": EPOCHS, "enable_checkpointing": saves, **quiet} | options
    return pl.Trainer(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, **options)


def _fit(
    pl: Any, strategy: Any, module: Any = None, ckpt_path: Any = None, **options: Any
) -> tuple[Any, Any]:
    module = _module(pl) if module is None else module
    trainer = _trainer(pl, strategy, **options)
    trainer.fit(module, _data(1, 12 * BATCHES), _data(2, 24), ckpt_path=ckpt_path)
    return module, trainer


def _beside_ddp() -> None:
    pl, ZeroStrategy = _lightning()
    for clipping, accumulated, stages in (
        ("norm", 1, (1, 2, 3, {"blocks": 3, "*": 2})),
        ("norm", 3, (0, 1, 2, 3)),
        ("value", 3, (3,)),
    ):
        options = {
            "accumulate_grad_batches": accumulated,
            "gradient_clip_val": 0.4 if clipping == "norm" else 0.02,
            "gradient_clip_algorithm": clipping,
        }
        expected, ddp = _fit(pl, "ddp", **options)
        assert len(expected.losses) == EPOCHS * BATCHES
        for stage in stages:
            where = f"stage {stage}, {accumulated} micro-batches, clipped by {clipping}"
            module, trainer = _fit(pl, ZeroStrategy(stage=stage), **options)
            assert module.losses == pytest.approx(expected.losses, rel=1e-5), where
            assert module.validated == pytest.approx(expected.validated, rel=1e-5), where
            if clipping == "norm":
                assert module.norms == pytest.approx(expected.norms, rel=1e-5), where
                assert max(module.norms) > 0.4, "nothing was clipped"
            assert trainer.global_step == ddp.global_step == EPOCHS * BATCHES // accumulated
            for name in ("train", "validated"):
                assert float(trainer.callback_metrics[name]) == pytest.approx(
                    float(ddp.callback_metrics[name]), rel=1e-5
                ), where
            rates = [[group["lr"] for group in t.optimizers[0].param_groups] for t in (trainer, ddp)]
            assert rates[0] == pytest.approx(rates[1])
            assert isinstance(trainer.optimizers[0], zerokit.ZeroOptimizer)


def _muon_beside_ddp(directory: Path) -> None:
    """Muon for the matrices of the blocks and AdamW for the rest, with one schedule for both; resumed, too."""
    pl, ZeroStrategy = _lightning()
    OptimizerList = import_module("zerokit.integrations.optimizer_list").OptimizerList

    def configure(self: Any) -> Any:
        matrices = [p for p in self.blocks.parameters() if p.ndim == 2]
        rest = [p for p in self.blocks.parameters() if p.ndim < 2] + [*self.head.parameters(), self.scale]
        optimizer = OptimizerList([torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=5e-3)])
        schedule = LinearLR(optimizer, 0.1, total_iters=6)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    found = []
    for strategy in ("ddp", ZeroStrategy(stage=1), ZeroStrategy(stage=3)):
        module = _module(pl, configure_optimizers=configure)
        module, trainer = _fit(pl, strategy, module, accumulate_grad_batches=2, gradient_clip_val=0.4)
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        found.append((module.losses, module.norms, rates))
    for losses, norms, rates in found[1:]:
        assert losses == pytest.approx(found[0][0], rel=1e-5)
        assert norms == pytest.approx(found[0][1], rel=1e-4)  # Muon rounds to bf16
        assert rates == found[0][2] == pytest.approx([1e-2, 5e-3])
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.4}
    keep = pl.callbacks.ModelCheckpoint(directory, save_last=True)
    module = _module(pl, configure_optimizers=configure)
    _fit(pl, ZeroStrategy(stage=3), module, max_epochs=1, callbacks=[keep], **options)
    other, _ = _fit(
        pl,
        ZeroStrategy(stage=2),
        _module(pl, configure_optimizers=configure),
        ckpt_path=directory / "last.ckpt",
        **options,
    )
    assert module.losses + other.losses == found[1][0]


def _by_hand_beside_ddp() -> None:
    pl, ZeroStrategy = _lightning()

    def manual(self: Any, batch: Any, number: int) -> None:
        optimizer = self.optimizers()
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.losses.append(loss.item())
        if number % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.4, gradient_clip_algorithm="norm")
            optimizer.step()
            self.lr_schedulers().step()
            optimizer.zero_grad()

    results = []
    for strategy in ("ddp", *(ZeroStrategy(stage=stage) for stage in (1, 3))):
        module = _module(pl, training_step=manual)
        module.automatic_optimization = False
        _, trainer = _fit(pl, strategy, module)
        results.append((module.losses, trainer.global_step))
    for losses, steps in results[1:]:
        assert losses == pytest.approx(results[0][0], rel=1e-5)
        assert steps == results[0][1] == EPOCHS * BATCHES // 2


def _half_precision() -> None:
    """The flag is Lightning's, the masters are zerokit's."""
    pl, ZeroStrategy = _lightning()
    losses = {}
    for flag in ("32-true", "bf16-mixed", "bf16-true"):
        module, trainer = _fit(pl, ZeroStrategy(stage=3), precision=flag, gradient_clip_val=0.4)
        zero = trainer.strategy.zero_optimizer
        assert zero.precision.compute == (torch.float32 if flag == "32-true" else torch.bfloat16)
        assert zero.precision.master == (torch.bfloat16 if flag == "bf16-true" else torch.float32)
        losses[flag] = module.losses
    module, trainer = _fit(
        pl, ZeroStrategy(stage=2, precision="fp16", on_nonfinite="raise"), gradient_clip_val=0.4
    )
    assert trainer.strategy.zero_optimizer.loss_scale > 1
    losses["fp16"] = module.losses
    for flag, found in losses.items():
        assert found == pytest.approx(losses["32-true"], rel=0.05), flag


@on_ranks(2)
def test_losses_norms_and_steps_are_those_of_ddp(tmp_path: Path) -> None:
    _beside_ddp()  # one after the other: a process imports Lightning for seconds
    _muon_beside_ddp(tmp_path)
    _by_hand_beside_ddp()
    _half_precision()


def _checkpointed(directory: str) -> list[float]:
    pl, ZeroStrategy = _lightning()

    def keep(**options: Any) -> Any:
        return pl.callbacks.ModelCheckpoint(
            directory, monitor="validated", save_top_k=2, save_last=True, **options
        )

    def remember(self: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"of": torch.arange(3), 4: (5,)}

    straight, _ = _fit(pl, ZeroStrategy(stage=2), max_epochs=5)
    module, trainer = _fit(
        pl, ZeroStrategy(stage=3), _module(pl, on_save_checkpoint=remember), max_epochs=3, callbacks=[keep()]
    )
    assert module.losses == pytest.approx(straight.losses[: 3 * BATCHES], rel=1e-6)
    kept = sorted(path.name for path in Path(directory).iterdir())
    assert "last.ckpt" in kept
    assert len(kept) == 3, kept  # the two best and the last
    best = Path(trainer.checkpoint_callback.best_model_path)
    zerokit.verify(best)

    # The module is still divided: it can be tested, and with what was best.
    trainer.test(module, _data(2, 24), verbose=False)
    trainer.test(module, _data(2, 24), ckpt_path="best", verbose=False)
    assert float(trainer.callback_metrics["validated"]) == pytest.approx(
        float(trainer.checkpoint_callback.best_model_score)
    )
    state = module.state_dict()
    assert state.keys() >= {"head.weight", "scale", "seen"}
    assert state["seen"] == 3 * BATCHES if best.name.startswith("epoch=2") else True

    # Alone, without training: whole on each rank.
    other = _trainer(pl, ZeroStrategy(stage=3))
    fresh = _module(pl)
    other.validate(fresh, _data(2, 24), ckpt_path=str(best), verbose=False)
    assert float(other.callback_metrics["validated"]) == pytest.approx(
        float(trainer.checkpoint_callback.best_model_score), rel=1e-5
    )
    losses: list[float] = straight.losses
    return losses


def _resumed(path: str, stage: int) -> list[float]:
    pl, ZeroStrategy = _lightning()
    seen = []

    def recall(self: Any, checkpoint: dict[str, Any]) -> None:
        seen.append(checkpoint["mine"])

    module, trainer = _fit(
        pl, ZeroStrategy(stage=stage), _module(pl, on_load_checkpoint=recall), ckpt_path=path, max_epochs=5
    )
    assert trainer.global_step == 5 * BATCHES
    assert seen[0]["of"].tolist() == [0, 1, 2]
    assert seen[0][4] == (5,)
    losses = torch.tensor(module.losses)
    dist.all_reduce(losses)
    return (losses / dist.get_world_size()).tolist()


def _mean(losses: list[list[float]]) -> list[float]:
    return [sum(values) / len(values) for values in zip(*losses, strict=True)]


def test_a_checkpoint_is_resumed_by_other_world_sizes_with_equal_losses(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    straight = _mean(run_ranks(2, _checkpointed, str(directory)))
    last = str(directory / "last.ckpt")
    step = zerokit.Checkpoint(last).step  # as with DDP: of the last epoch that was among the best
    assert 0 < step < 5 * BATCHES
    for world, stage in ((1, 3), (3, 1)):
        for losses in run_ranks(world, _resumed, last, stage):
            assert losses == pytest.approx(straight[step:], rel=1e-5), world
    zerokit.consolidate(last, tmp_path / "weights")
    assert {"blocks.0.0.weight", "head.bias", "scale", "seen"} <= set(
        load_file(tmp_path / "weights" / "model.safetensors")
    )


@on_ranks(2)
def test_a_frozen_base_stays_out_of_checkpoints(tmp_path: Path) -> None:
    pl, ZeroStrategy = _lightning()
    path = str(tmp_path / "last.ckpt")

    def head(self: Any) -> Any:
        return torch.optim.AdamW([*self.head.parameters(), self.scale], lr=1e-2)

    def made(base: float) -> Any:
        module = _module(pl, configure_optimizers=head)
        module.blocks.requires_grad_(False)
        nn.init.constant_(module.blocks[1][0].bias, base)
        return module

    straight, trainer = _fit(pl, ZeroStrategy(stage=3, frozen="never"), made(0.5), max_epochs=1)
    trainer.save_checkpoint(path)
    assert zerokit.inspect(path).frozen == ""
    again, _ = _fit(pl, ZeroStrategy(stage=3), made(0.5), max_epochs=2)
    resumed, _ = _fit(pl, ZeroStrategy(stage=2), made(0.5), ckpt_path=path, max_epochs=2)
    assert straight.losses + resumed.losses == pytest.approx(again.losses, rel=1e-5)
    with pytest.raises(zerokit.CheckpointError, match=r"that saved it: blocks\.1\.0\.bias. Build the model"):
        _fit(pl, ZeroStrategy(stage=3), made(0.25), ckpt_path=path, max_epochs=2)
    with pytest.raises(zerokit.UsageError, match="frozen='once': expected 'always' or 'never'"):
        ZeroStrategy(frozen="once")


@on_ranks(2)
def test_weights_only_checkpoints_hold_weights_and_are_loaded_as_such(tmp_path: Path) -> None:
    """Weights that a callback and a call have saved: tested, gone on from, and no state to resume."""
    directory = tmp_path / "run"
    pl, ZeroStrategy = _lightning()
    keep = pl.callbacks.ModelCheckpoint(directory, monitor="validated", save_top_k=1, save_weights_only=True)
    module, trainer = _fit(pl, ZeroStrategy(stage=3), max_epochs=2, callbacks=[keep])
    path = trainer.checkpoint_callback.best_model_path
    trainer.save_checkpoint(f"{directory}/called", weights_only=True)
    trainer.save_checkpoint(f"{directory}/whole")
    for name, weights_only in ((path, True), (f"{directory}/called", True), (f"{directory}/whole", False)):
        checkpoint = zerokit.Checkpoint(name)
        assert checkpoint.weights_only == weights_only, name
        assert {stream.kind for stream in checkpoint.streams} == (
            {"master"} if weights_only else {"master", "exp_avg", "exp_avg_sq"}
        )

    # Divided still, and whole on each rank.
    states = [
        value.clone() for state in trainer.strategy.zero_optimizer.state.values() for value in state.values()
    ]
    best = float(trainer.checkpoint_callback.best_model_score)
    for tester in (trainer, _trainer(pl, ZeroStrategy(stage=3))):
        net = module if tester is trainer else _module(pl)
        tester.test(net, _data(2, 24), ckpt_path=path, verbose=False)
        assert float(tester.callback_metrics["validated"]) == pytest.approx(best, rel=1e-5)
    now = [value for state in trainer.strategy.zero_optimizer.state.values() for value in state.values()]
    assert all(torch.equal(one, other) for one, other in zip(states, now, strict=True))

    with pytest.raises(zerokit.CheckpointError, match=r"weights only.*leave ckpt_path out.*on_fit_start"):
        _fit(pl, ZeroStrategy(stage=2), ckpt_path=path)

    def start(self: Any) -> None:
        zerokit.load(path, self.trainer.strategy.zero_optimizer, weights_only=True)

    begun, _ = _fit(pl, ZeroStrategy(stage=2), _module(pl, on_fit_start=start), max_epochs=1)
    assert begun.validated[:2] == pytest.approx(module.validated[-2:], rel=1e-5)  # before the first step


@on_ranks(2)
def test_a_module_keeps_its_own_methods_is_fitted_again_and_loaded_from_a_checkpoint(tmp_path: Path) -> None:
    pl, ZeroStrategy = _lightning()
    calls = []

    def head_alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = pl.LightningModule.state_dict(self, *args, **kwargs)
        return {name: value for name, value in state.items() if not name.startswith("blocks")}

    def load(self: Any, state: Any, **kwargs: Any) -> Any:
        calls.append(len(state))
        return pl.LightningModule.load_state_dict(self, state, strict=False)

    module, expected = (
        _module(pl, state_dict=head_alone, load_state_dict=load, configure_optimizers=_slow) for _ in range(2)
    )
    _fit(pl, "ddp", expected, max_epochs=1)
    _, trainer = _fit(pl, ZeroStrategy(stage=2), module, max_epochs=1, precision="bf16-mixed")
    state = module.state_dict()
    assert state.keys() == expected.state_dict().keys() == {"head.weight", "head.bias", "scale", "seen"}
    # The masters: in bfloat16 steps of 2e-5 would leave ones as they were.
    assert state["scale"].dtype == torch.float32
    assert bool((state["scale"] != 1).all())
    module.load_state_dict({name: value.clone() for name, value in state.items()})
    assert calls == [4]
    path = f"{tmp_path}/saved.ckpt"
    trainer.save_checkpoint(path)
    net = type(module)
    del net.state_dict, net.load_state_dict
    whole = module.state_dict()
    loaded = net.load_from_checkpoint(path, map_location="cpu", strict=False)
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in whole.items())

    again, _ = _fit(pl, ZeroStrategy(stage=3), module, max_epochs=1)
    torch.manual_seed(5)
    plain, _ = _fit(pl, "ddp", loaded, max_epochs=1)
    assert again.losses[BATCHES:] == pytest.approx(plain.losses, rel=1e-5)


def _slow(module: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=2e-5, weight_decay=0.0)


@on_ranks(2)
def test_what_does_not_go_together_is_refused_with_the_line_to_write(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    pl, ZeroStrategy = _lightning()

    def refused(
        match: str, strategy: Callable[[], Any] = ZeroStrategy, module: Any = None, **options: Any
    ) -> None:
        with pytest.raises(zerokit.ZerokitError, match=match):
            _fit(pl, strategy(), module, **options)

    def configured(optimizers: Callable[[Any], Any]) -> Any:
        return _module(pl, configure_optimizers=optimizers)

    def of_parts(module: Any) -> list[torch.optim.Optimizer]:
        module.automatic_optimization = False
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (module.blocks, module.head)]

    refused("no option stages", lambda: ZeroStrategy(stages=2))
    refused("stage", lambda: ZeroStrategy(stage=4))
    refused("64-true", precision="64-true")
    refused("leave one of them out", lambda: ZeroStrategy(precision="bf16"), precision="bf16-mixed")
    refused("CheckpointIO plugin out", plugins=[pl.plugins.TorchCheckpointIO()])
    refused("returned None", module=configured(lambda module: None))
    refused("2 optimizers", module=configured(of_parts))
    refused("LBFGS", module=configured(lambda module: torch.optim.LBFGS(module.parameters())))
    refused(
        "return the torch optimizer",
        module=configured(lambda module: zerokit.ZeroOptimizer(module, torch.optim.SGD, lr=0.1)),
    )
    refused("calls its update", callbacks=[pl.callbacks.StochasticWeightAveraging(1e-2)])
    thaw = type("Thaw", (pl.callbacks.BaseFinetuning,), {"freeze_before_training": lambda *given: None})
    refused("adds parameter groups", callbacks=[thaw()])
    refused("are in no group", module=configured(lambda module: torch.optim.SGD(module.head.parameters())))
    refused(
        "fp16 scale",
        lambda: ZeroStrategy(precision="fp16"),
        _module(pl, backward=lambda self, loss: loss.backward()),
    )
    refused("not a zerokit checkpoint", ckpt_path=__file__)
    model = nn.Linear(2, 2)
    zero = zerokit.ZeroOptimizer(model, torch.optim.SGD, precision="fp32", lr=0.1)
    zerokit.save(directory, zero, step=1)
    refused("not saved by Lightning|does not fit", ckpt_path=directory)

    def unwritable(self: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = object()

    keep = pl.callbacks.ModelCheckpoint(f"{directory}/kept")
    refused(
        r"mine.*object.*leave it out", module=_module(pl, on_save_checkpoint=unwritable), callbacks=[keep]
    )
    dist.barrier()  # rank 0 cleans up
    assert not os.path.exists(f"{directory}/kept") or not os.listdir(f"{directory}/kept")
