"""One client's local training: what it holds, what it does, what it sends back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, final, get_args

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from leakwatch.checks import check_choice, check_samples
from leakwatch.derivatives.runtime import Criterion, Weights
from leakwatch.derivatives.runtime.rng_and_precision import seed_streams
from leakwatch.derivatives.verification import refuse_stray_reads
from leakwatch.federated.faults import (
    check_finite,
    check_losses,
    check_training,
    single_samples,
)
from leakwatch.federated.objective import Objective
from leakwatch.federated.streams import client_seed, client_stream
from leakwatch.weight_update import LocalTraining

__all__ = ["ClientUpdate", "Record", "train_client"]

Record: TypeAlias = Literal["steps", "full", "weights"]

_DEFAULT_MEMORY = 4096.0


@final
@dataclass(frozen=True, eq=False)
class ClientUpdate:
    """What one client did in one round, with what only the client knows.

    Attributes:
        initial: w_0, ``(d_θ,)``.
        final: w_T, ``(d_θ,)``.
        x: its samples, ``(N, …)``.
        y: their labels, ``(N,)``.
        training: the local training.
        client: its number.
        round: the communication round.
        losses: mean loss of the batch before each step, ``(T,)``.
        initial_buffers: the module's buffers before training, by name.
        buffers: the module's buffers after training, by name.
        record: what ``recorded`` holds.
        recorded: one row per step t, ``(T, d_θ)``: ``"steps"`` the gradient of the
            batch at w_t, ``"full"`` that of all N samples at w_t, ``"weights"`` w_t.
    """

    initial: Float[Tensor, " d_theta"]
    final: Float[Tensor, " d_theta"]
    x: Float[Tensor, "N ..."]
    y: Shaped[Tensor, "N ..."]
    training: LocalTraining
    client: int
    round: int
    losses: Float[Tensor, " T"]
    initial_buffers: dict[str, Tensor]
    buffers: dict[str, Tensor]
    record: Record | None = None
    recorded: Float[Tensor, "T d_theta"] | None = None

    @property
    def samples(self) -> int:
        """N."""
        return len(self.x)

    @property
    def steps(self) -> int:
        """T = E·⌈N/B⌉."""
        return len(self.losses)

    @property
    def difference(self) -> Float[Tensor, " d_theta"]:
        """w_0 − w_T."""
        return self.initial - self.final

    @property
    def diverged(self) -> bool:
        """Whether a weight is NaN or infinite at the end."""
        return not bool(torch.isfinite(self.final).all())


def train_client(
    module: nn.Module,
    x: Float[Tensor, "N ..."],
    y: Shaped[Tensor, "N ..."],
    training: LocalTraining,
    *,
    client: int = 0,
    round: int = 0,
    seed: int = 0,
    criterion: Criterion | None = None,
    dtype: torch.dtype | None = None,
    freeze_batchnorm: bool = True,
    record: Record | None = None,
    max_memory: float = _DEFAULT_MEMORY,
) -> ClientUpdate:
    """Local SGD of one client from the module's weights (McMahan et al. 2017).

    E epochs over the samples in batches of B, reshuffled every epoch, the last batch
    smaller where B does not divide N: T = E·⌈N/B⌉ steps of ``torch.optim.SGD`` on the
    mean loss of the batch. The module is left as it was; so are the global random
    streams, and what they hold doesn't matter: shuffling and dropout draw from streams
    named by seed, round and client, so that the order of clients doesn't matter either.

    The module runs in train mode, in full precision and without autocast. With
    ``freeze_batchnorm``, BatchNorm uses its running statistics and leaves them alone,
    as in Zhu, Yao & Blaschko (ICML 2023), whose clients train in eval mode.

    Args:
        module: the network that the server sent.
        x: the client's samples, as the network takes them.
        y: their labels.
        training: epochs, batch size, learning rate, momentum and weight decay.
        client: names the random stream, at least 0.
        round: names the random stream, at least 0.
        seed: of the simulation, at least 0.
        criterion: one loss per sample. Default: accurate cross-entropy of
            ``module(x)``.
        dtype: float32 or float64. Default: that of the parameters.
        freeze_batchnorm: whether BatchNorm keeps its running statistics. ``False``: it
            normalises each batch by itself, as usual in training, and returns updated
            statistics in ``buffers``. Buffers that a forward replaces, instead of
            writing into them, come back as they were.
        record: also keep one row per step, for :mod:`leakwatch.federated.analysis`:
            ``"steps"``, ``"full"`` (one more gradient of all samples per step) or
            ``"weights"``; see :class:`ClientUpdate`. Takes T·d_θ numbers and changes
            nothing else: dropout of a ``"full"`` row draws from where the client's
            stream stands after the step's batch, and the stream is put back.
        max_memory: MiB that a record may take.

    Returns:
        Weights before and after, and what happened between. Training that diverges is
        an outcome, not an error: see :attr:`ClientUpdate.diverged`.

    Raises:
        TypeError: if ``module`` is no ``nn.Module``, the samples no tensors, or
            ``training`` no :class:`LocalTraining`.
        ValueError: for a module without trainable parameters, samples and labels that
            don't go together, a sample that holds NaN or whose loss is not finite at
            the start (a label out of range), a batch of one sample for BatchNorm that
            isn't frozen, an unknown record or one beyond ``max_memory``.
        UnsupportedModuleError: for a network that reads parameters where they are not
            registered.

    Example:
        >>> net = nn.Linear(3, 2)
        >>> x, y = torch.rand(5, 3), torch.tensor([0, 1, 1, 0, 1])
        >>> how = LocalTraining(epochs=2, batch_size=2, lr=0.1)
        >>> update = train_client(net, x, y, how)
        >>> update.steps, update.samples, tuple(update.final.shape)
        (6, 5, (8,))
    """
    check_samples(x, y)
    check_finite(x, client)
    check_training(training)
    objective = Objective(module, criterion, dtype)
    steps = training.steps(len(x))
    _check_record(record, steps, objective, max_memory)
    x = x.detach().to(objective.dtype)
    y = y.detach().to(x.device)
    shuffle = client_stream(seed, round, client)
    dropout = client_seed(seed, round, client, 1)
    losses: list[Tensor] = []
    rows: list[Tensor] = []
    with objective.evaluation(x.device.type) as weights:
        refuse_stray_reads(objective.loss, weights, x, y)
        seed_streams(dropout)
        _set_modes(objective.loss, freeze_batchnorm)
        shared = list(weights.shared.values())
        initial = objective.flat_of(weights, shared)
        initial_buffers = objective.buffers_of(weights)
        for p in shared:
            p.requires_grad_()
        optimizer = torch.optim.SGD(
            shared,
            lr=training.lr,
            momentum=training.momentum,
            weight_decay=training.weight_decay,
        )
        for epoch in range(training.epochs):
            order = torch.randperm(len(x), generator=shuffle).to(x.device)
            batches = torch.split(order, int(training.batch_size))
            for batch in batches:
                with single_samples(client, len(batch)):
                    loss, grads = objective.gradient(weights, x[batch], y[batch])
                if record is not None:
                    rows.append(_row(record, objective, weights, grads, x, y))
                for p, grad in zip(shared, grads, strict=True):
                    p.grad = grad
                optimizer.step()
                losses.append(loss)
            if epoch == 0:
                check_losses(objective, weights, initial, losses, batches, x, y, client)
        final = objective.flat_of(weights, shared)
        buffers = objective.buffers_of(weights)
    return ClientUpdate(
        initial=initial,
        final=final,
        x=x,
        y=y,
        training=training,
        client=client,
        round=round,
        losses=torch.stack(losses),
        initial_buffers=initial_buffers,
        buffers=buffers,
        record=record,
        recorded=torch.stack(rows) if rows else None,
    )


def _row(
    record: Record,
    objective: Objective,
    weights: Weights,
    grads: Sequence[Tensor | None],
    x: Tensor,
    y: Tensor,
) -> Tensor:
    if record == "steps":
        return objective.flat_of(weights, grads)
    if record == "weights":
        return objective.flat_of(weights, list(weights.shared.values()))
    return objective.flat_gradient(weights, x, y)


def _check_record(
    record: Record | None, steps: int, objective: Objective, max_memory: float
) -> None:
    if record is None:
        return
    check_choice("record", record, get_args(Record))
    size = objective.size
    need = steps * size * objective.dtype.itemsize / 2**20
    if need > max_memory:
        raise ValueError(
            f"recording {steps} steps of {size:,} weights takes {need:,.0f} MiB, more "
            f"than max_memory={max_memory:,.0f}; raise it, or take fewer epochs, a "
            f"larger batch or a smaller network."
        )


def _set_modes(root: nn.Module, freeze_batchnorm: bool) -> None:
    # Set one by one: train() of a module may be overridden.
    for m in root.modules():
        normalising = isinstance(m, nn.modules.batchnorm._BatchNorm)
        m.training = not (freeze_batchnorm and normalising)
