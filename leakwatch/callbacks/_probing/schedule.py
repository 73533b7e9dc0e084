"""Whether a schedule ever comes before training ends."""

from __future__ import annotations

import math

from lightning.pytorch import Trainer

__all__ = ["last_epoch", "never_due"]


def last_epoch(trainer: Trainer) -> int | None:
    """How many epochs will have begun when training ends; ``None``: not known.

    Args:
        trainer: once training has started, so that it knows its batches.
    """
    ends = []
    if trainer.max_epochs is not None and trainer.max_epochs >= 0:
        ends.append(trainer.max_epochs)
    batches = trainer.num_training_batches
    if trainer.max_steps >= 0 and 0 < batches < math.inf:
        steps = math.ceil(batches / max(trainer.accumulate_grad_batches, 1))
        left = max(trainer.max_steps - trainer.global_step, 0)
        ends.append(trainer.current_epoch + math.ceil(left / steps))
    return min(ends, default=None)


def never_due(
    name: str, every_n_epochs: int, trainer: Trainer, *, starts: bool = False
) -> str:
    """A warning where no n-th epoch is left before training ends; else empty.

    Args:
        name: of the callback's class.
        every_n_epochs: n.
        trainer: as in :func:`last_epoch`.
        starts: whether it runs before training.
    """
    last = last_epoch(trainer)
    done = trainer.current_epoch
    if last is None or last <= done or getattr(trainer, "fast_dev_run", False):
        return ""
    if (done // every_n_epochs + 1) * every_n_epochs <= last:
        return ""
    left = last - done
    what = (
        "runs before training only, and will say nothing of what training does to it"
        if starts
        else "will not run in this training, and there will be nothing to report"
    )
    return (
        f"{name} {what}: it has every_n_epochs={every_n_epochs}, but "
        f"training ends after "
        f"{last} {'epoch' if last == 1 else 'epochs'}; set every_n_epochs to at most "
        f"{left if not done else 1}, or train longer."
    )
