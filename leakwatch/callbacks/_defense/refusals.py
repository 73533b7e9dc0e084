"""Runs whose steps can't be defended, and what to do about them."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.optim import LBFGS

from leakwatch.callbacks._probing.distributed import refuse_device, refuse_sharded
from leakwatch.defenses import Defense

__all__ = ["refuse_optimizers", "refuse_run", "scaler_of"]


def scaler_of(trainer: Trainer) -> Any | None:
    """What scales losses in half precision, and skips steps; ``None`` for nothing.

    Args:
        trainer: the trainer.
    """
    return getattr(trainer.precision_plugin, "scaler", None)


def refuse_run(trainer: Trainer, module: LightningModule, defense: Defense) -> None:
    """Raises where the gradient that is consumed can't be the defended one.

    Args:
        trainer: the trainer, with its strategy chosen.
        module: what is trained.
        defense: the defense.

    Raises:
        RuntimeError: with what to change.
    """
    refuse_device(trainer, "GradientDefense")
    try:
        refuse_sharded(trainer, "GradientDefense")
    except RuntimeError as error:
        raise RuntimeError(
            f"GradientDefense acts on whole gradients, but under "
            f"{type(trainer.strategy).__name__} each process holds a part; train with "
            f"strategy='ddp'."
        ) from error
    if trainer.world_size > 1 and not isinstance(trainer.strategy, DDPStrategy):
        raise RuntimeError(
            f"GradientDefense knows how strategy='ddp' averages gradients, not "
            f"{type(trainer.strategy).__name__}; train with strategy='ddp'."
        )
    for name, part in module.named_modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.sparse:
            raise RuntimeError(
                f"{name} has sparse gradients, and noise on the entries that they hold "
                f"would tell which rows were used; make it with sparse=False."
            )
    if defense.needs != "gradient":
        _refuse_for_samples(trainer, module, defense)


def _refuse_for_samples(
    trainer: Trainer, module: LightningModule, defense: Defense
) -> None:
    name = f"GradientDefense({defense.name!r})"
    if trainer.world_size > 1:
        raise RuntimeError(
            f"{name} looks at the samples of a step, which {trainer.world_size} "
            f"processes share; train with devices=1, or use a defense of gradients "
            f"such as GaussianNoise."
        )
    if not module.automatic_optimization:
        raise RuntimeError(
            f"{name} must know how a step combines samples, which it can't in manual "
            f"optimisation; use automatic optimisation, or a defense of gradients such "
            f"as GaussianNoise."
        )
    if not trainer.gradient_clip_val:
        return
    if defense.needs == "sample gradients":
        raise RuntimeError(
            f"{name} clips the gradient of each sample; remove "
            f"gradient_clip_val={trainer.gradient_clip_val} from the Trainer, which "
            f"would clip once more."
        )
    if trainer.gradient_clip_algorithm == "value":
        raise RuntimeError(
            f"{name} can't follow samples through clipping by value; use "
            f"gradient_clip_algorithm='norm'."
        )


def refuse_optimizers(
    trainer: Trainer, module: LightningModule, defense: Defense
) -> None:
    """Raises for optimisers whose gradient can't be defended.

    Args:
        trainer: the trainer, with its optimisers.
        module: what is trained.
        defense: the defense.

    Raises:
        RuntimeError: with what to change.
    """
    optimizers = trainer.optimizers
    for optimizer in optimizers:
        kind = type(optimizer).__name__
        if isinstance(optimizer, LBFGS):
            raise RuntimeError(
                "LBFGS evaluates several gradients a step, and more are shared than "
                "are counted; use SGD or Adam."
            )
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        if scaler_of(trainer) is not None and fused:
            raise RuntimeError(
                f"a fused {kind} unscales gradients inside of its step, where no "
                f"defense can act on them; use {kind}(fused=False), or "
                f"precision='bf16-mixed'."
            )
    if defense.needs == "gradient":
        return
    if len(optimizers) != 1:
        raise RuntimeError(
            f"GradientDefense({defense.name!r}) protects the gradient of each sample "
            f"as a whole and needs one optimiser, got {len(optimizers)}."
        )
    held = {id(p) for group in optimizers[0].param_groups for p in group["params"]}
    for name, p in module.named_parameters():
        if p.requires_grad and id(p) not in held:
            raise RuntimeError(
                f"parameter {name!r} is trained by no optimiser, but a part of each "
                f"sample's gradient; freeze it with requires_grad_(False)."
            )
