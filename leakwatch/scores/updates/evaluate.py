"""Scores of all clients of an update, one after the other."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leakwatch.checks import check_number, check_shape
from leakwatch.derivatives import GradientMap
from leakwatch.scores.measure.inputs import ScoreInputs
from leakwatch.scores.registry import Score
from leakwatch.scores.result import columns
from leakwatch.scores.settings import Settings
from leakwatch.scores.updates.client import ClientScores, Effort, score_client
from leakwatch.scores.updates.result import UpdateScores
from leakwatch.scores.updates.surrogate import Surrogate
from leakwatch.weight_update import WeightUpdate

__all__ = ["check_clients", "evaluate_update"]


def evaluate_update(
    gradients: GradientMap,
    x: Float[Tensor, "clients N ..."],
    y: Int[Tensor, "clients N"],
    update: WeightUpdate,
    scores: Sequence[Score],
    settings: Settings,
    *,
    offset: Float[Tensor, "clients N d_x"],
    input_scale: Float[Tensor, " d_x"] | None = None,
    alpha: float | None = None,
    effort: Effort | None = None,
) -> UpdateScores:
    """:func:`leakwatch.score_update` for a gradient map and inputs checked before.

    Args:
        gradients: the gradient map.
        x: network inputs on the module's device.
        y: labels there.
        update: what the clients share.
        scores: resolved scores.
        settings: noise, prior and pixels; without ``noise_std`` each client gets its
            own.
        offset: X − μ in pixel units.
        input_scale: d(input)/d(pixel).
        alpha: as in :func:`leakwatch.score_update`.
        effort: what it may cost.

    Returns:
        The scores. A client that can't be scored has the status ``failed``.

    Raises:
        TypeError: for an α that is no number.
        ValueError: for an α outside of [0, 1], or nothing to compute.
        Exception: that which stopped every single client.
    """
    started = time.perf_counter()
    effort = Effort() if effort is None else effort
    if alpha is not None:
        check_number("alpha", alpha, "[0, 1]", example=0.5)
    if not (effort.blocks or effort.joint):
        raise ValueError("blocks and joint are both False, so there is no score.")
    clients: list[_Client] = []
    errors: list[Exception] = []
    for client in range(update.clients):
        inputs = ScoreInputs(
            gradients, x[client], y[client], input_scale, offset[client]
        )
        surrogate = Surrogate(gradients, update, client)
        try:
            clients.append(_client(surrogate, inputs, scores, settings, alpha, effort))
        except Exception as error:
            errors.append(error)
            nothing = ClientScores.failed(error, scores, x.shape[1], effort)
            clients.append(_Client(nothing))
    if len(errors) == update.clients:
        raise errors[0]
    return _gathered(
        clients, gradients.notes, time.perf_counter() - started, gradients.dtype
    )


def check_clients(
    gradients: GradientMap, x: Tensor, y: Tensor, update: WeightUpdate
) -> None:
    """Raises unless these samples can be those behind the update.

    Args:
        gradients: the gradient map.
        x: network inputs, ``(clients, N, ...)``.
        y: labels, ``(clients, N)``.
        update: what the clients share.

    Raises:
        ValueError: for other shapes or labels, and what
            :meth:`leakwatch.derivatives.GradientMap.check` refuses; names the client.
    """
    expected = (update.clients, update.samples, *update.sample_shape)
    check_shape("x", x, expected)
    check_shape("y", y, expected[:2])
    for client in range(update.clients):
        try:
            gradients.check(x[client], y[client])
        except ValueError as error:
            raise ValueError(f"client {client}: {error}") from error
    if update.labels is None:
        return
    same = (y.sort(1).values == update.labels.to(y.device).sort(1).values).all(1)
    if not bool(same.all()):
        raise ValueError(
            f"the labels of client {int((~same).nonzero()[0])} are not those of its "
            f"update; give x and y in the order of update.final."
        )


@final
@dataclass(frozen=True)
class _Client:
    """One client's scores, and the surrogate that they hold at."""

    scores: ClientScores
    alpha: float = math.nan
    similarity: float = math.nan
    mismatch: float = math.nan
    noise_std: float = math.nan


def _client(
    surrogate: Surrogate,
    inputs: ScoreInputs,
    scores: Sequence[Score],
    settings: Settings,
    alpha: float | None,
    effort: Effort,
) -> _Client:
    x, y = inputs.x, inputs.y
    best = surrogate.best_alpha(x, y) if alpha is None else alpha
    if not math.isfinite(best):
        raise ArithmeticError(
            "the gradient of this client vanishes between w_0 and w_T; there is no "
            "surrogate whose gradient its update resembles"
        )
    mismatch = surrogate.mismatch(x, y, best)
    if not (math.isfinite(mismatch.noise_std) and mismatch.noise_std > 0):
        raise ArithmeticError(
            "the gradient at the surrogate is zero or not finite; look for overflow in "
            "the weights of this client"
        )
    assumed = replace(settings, noise_std=settings.noise_std or mismatch.noise_std)
    with surrogate.at(best) as gradients:
        at_surrogate = replace(inputs, gradients=gradients)
        values = score_client(at_surrogate, mismatch, scores, assumed, effort)
    size, _ = mismatch.direction
    return _Client(
        values,
        alpha=best,
        similarity=surrogate.cosine(mismatch.gradient),
        mismatch=float(mismatch.delta.norm()) / size if size > 0 else math.nan,
        noise_std=assumed.noise_std or math.nan,
    )


def _gathered(
    clients: Sequence[_Client],
    notes: tuple[str, ...],
    seconds: float,
    dtype: torch.dtype,
) -> UpdateScores:
    def column(numbers: list[float]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float64)

    tables = [columns(c.scores.samples, dtype) for c in clients]
    client_numbers, client_status = columns([c.scores.client for c in clients], dtype)
    return UpdateScores(
        numbers={
            name: torch.stack([numbers[name] for numbers, _ in tables])
            for name in tables[0][0]
        },
        status={
            name: tuple(status[name] for _, status in tables) for name in tables[0][1]
        },
        client_numbers=client_numbers,
        client_status=client_status,
        alpha=column([c.alpha for c in clients]),
        similarity=column([c.similarity for c in clients]),
        mismatch=column([c.mismatch for c in clients]),
        noise_std=column([c.noise_std for c in clients]),
        notes=notes,
        seconds=seconds,
    )
