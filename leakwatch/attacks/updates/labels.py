"""Labels for attacks on updates: given, or counted in the last layer's update."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leakwatch.attacks.labels.counts import count_labels
from leakwatch.attacks.labels.last_layer import Head, find_head
from leakwatch.derivatives import GradientMap
from leakwatch.status import Status
from leakwatch.weight_update import LocalTraining, WeightUpdate

__all__ = ["client_labels", "mean_gradient_scale", "with_weights"]


def client_labels(
    gradients: GradientMap, update: WeightUpdate, seed: int = 0
) -> tuple[Int[Tensor, "clients N"], tuple[Status, ...]]:
    """Known labels, or those that the update of the last layer tells.

    Dimitrov et al., "Data Leakage in Federated Averaging" (TMLR 2022), Section 4.2:
    N·(P_c − b_c) samples are of class c, with b the mean bias gradient over the local
    steps and P the mean softmax, which moves while the client trains and is taken
    halfway between its values at w_0 and w_T.

    Args:
        gradients: the network.
        update: what the clients shared.
        seed: of guessed inputs.

    Returns:
        Labels in ascending order where they were counted, and what they are worth.

    Raises:
        ValueError: if labels are unknown and so is the local training, without which
            the update has no scale, or there is one with weight decay.
        UnsupportedModuleError: if the logits are not those of a linear layer.
    """
    if update.labels is not None:
        return update.labels, (Status("ok"),) * update.clients
    training = update.training
    if training is None:
        raise ValueError(
            "the update has no labels, and without the local training they can't be "
            "counted in it: give labels=(clients, N), in any order, or "
            "training=LocalTraining(epochs, batch_size, lr)."
        )
    scale = mean_gradient_scale(training, update.samples)
    head = _head(gradients, update.initial, update, seed)
    labels, statuses = [], []
    for final, difference in zip(update.final, update.difference, strict=True):
        end = _head(gradients, final, update, seed)
        between = replace(
            head,
            weight=(head.weight + end.weight) / 2,
            bias=(head.bias + end.bias) / 2,
            softmax=(head.softmax + end.softmax) / 2,
        )
        g = between.read((difference.double() / scale).cpu())
        counts, status = count_labels(between, g, update.samples)
        labels.append(torch.arange(head.classes).repeat_interleave(counts))
        why = f"; {status.reason}" if status.reason else ""
        statuses.append(
            Status("estimated", f"labels were counted in an update of many steps{why}")
        )
    return torch.stack(labels).to(update.final.device), tuple(statuses)


def mean_gradient_scale(training: LocalTraining, samples: int) -> float:
    """The number by which w_0 − w_T is divided to be a mean over local gradients.

    A step's gradient moves the weights by lr (1 − μ^k)/(1 − μ), when k steps follow up
    to and with its own; without momentum that is lr·T in total.

    Args:
        training: of the client.
        samples: N.

    Returns:
        The sum over steps, in units of lr.

    Raises:
        ValueError: with weight decay, which moves weights without any gradient.

    Example:
        >>> mean_gradient_scale(LocalTraining(2, 5, lr=0.5), samples=10)
        2.0
    """
    if training.weight_decay:
        raise ValueError(
            f"labels can't be counted under weight_decay={training.weight_decay:g}, "
            f"which moves the last layer too; give the labels."
        )
    steps, mu = training.steps(samples), training.momentum
    return training.lr * sum((1 - mu**k) / (1 - mu) for k in range(1, steps + 1))


def with_weights(gradients: GradientMap, w: Float[Tensor, " d_theta"]) -> GradientMap:
    """The same map at other weights, with a module of its own.

    Args:
        gradients: the map; left as it is.
        w: all shared weights, in its order.

    Returns:
        A new map on a copy of the module.
    """
    module = copy.deepcopy(gradients.module)
    sizes = gradients.sizes()
    named = dict(module.named_parameters())
    with torch.no_grad():
        for name, part in zip(sizes, torch.split(w, list(sizes.values())), strict=True):
            named[name].copy_(part.view_as(named[name]))
    return GradientMap(
        module,
        gradients.criterion,
        prepare=gradients.prepare,
        parameters=list(sizes),
        dtype=gradients.dtype,
    )


def _head(gradients: GradientMap, w: Tensor, update: WeightUpdate, seed: int) -> Head:
    return find_head(with_weights(gradients, w), update.sample_shape, seed=seed)
