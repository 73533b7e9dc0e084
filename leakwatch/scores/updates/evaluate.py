"""Scores of all clients of an update, one after the other."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from leakwatch.checks import check_shape
from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.jacobian import GradientJacobian
from leakwatch.scores.measure.batches import sample_losses
from leakwatch.scores.registry import Score
from leakwatch.scores.result import Value
from leakwatch.scores.settings import Settings
from leakwatch.scores.updates.client import (
    JOINT,
    ClientScores,
    Effort,
    score_client,
)
from leakwatch.scores.updates.mismatch import Mismatch
from leakwatch.scores.updates.result import UpdateScores
from leakwatch.scores.updates.surrogate import Surrogate
from leakwatch.status import describe_error
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
    _check_alpha(alpha)
    if not (effort.blocks or effort.joint):
        raise ValueError("blocks and joint are both False, so there is no score.")
    found: list[_Client] = []
    errors: list[Exception] = []
    for client in range(update.clients):
        try:
            found.append(
                _client(
                    Surrogate(gradients, update, client),
                    x[client],
                    y[client],
                    scores,
                    settings,
                    offset[client],
                    input_scale,
                    alpha,
                    effort,
                )
            )
        except Exception as error:
            errors.append(error)
            found.append(_Client.failed(error, scores, x.shape[1], effort))
    if len(errors) == update.clients:
        raise errors[0]
    return _gathered(found, gradients.notes, time.perf_counter() - started)


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


def _check_alpha(alpha: object) -> None:
    if alpha is None:
        return
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise TypeError(
            f"alpha must be a number in [0, 1] or None, got {alpha!r} "
            f"({type(alpha).__name__}); for instance alpha=0.5, the same for all."
        )
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be in [0, 1], got {alpha}; 1 is w_0, 0 is w_T.")


class _Client:
    """What was found about one client."""

    def __init__(
        self,
        alpha: float,
        mismatch: Mismatch | None,
        noise_std: float,
        similarity: float,
        scores: ClientScores,
    ) -> None:
        self.alpha, self.noise_std = alpha, noise_std
        self.similarity, self.scores = similarity, scores
        self.mismatch = math.nan
        if mismatch is not None and float(mismatch.gradient.norm()) > 0:
            self.mismatch = float(mismatch.delta.norm() / mismatch.gradient.norm())

    @classmethod
    def failed(
        cls, error: Exception, scores: Sequence[Score], n: int, effort: Effort
    ) -> _Client:
        gone = Value.without("failed", describe_error(error))
        names = [s.name for s in scores] if effort.blocks else []
        names += JOINT if effort.joint else ()
        client = {s.name: gone for s in scores} if effort.joint else {}
        nothing = ClientScores({name: [gone] * n for name in names}, client)
        return cls(math.nan, None, math.nan, math.nan, nothing)


def _client(
    surrogate: Surrogate,
    x: Tensor,
    y: Tensor,
    scores: Sequence[Score],
    settings: Settings,
    offset: Tensor,
    input_scale: Tensor | None,
    alpha: float | None,
    effort: Effort,
) -> _Client:
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
    assumed = settings.noise_std or mismatch.noise_std
    with surrogate.at(best) as gradients:
        jacobian = GradientJacobian(gradients, x, y, input_scale=input_scale)
        found = score_client(
            jacobian,
            mismatch,
            sample_losses(gradients, x, y),
            offset,
            scores,
            replace(settings, noise_std=assumed),
            effort,
        )
    return _Client(best, mismatch, assumed, surrogate.cosine(mismatch.gradient), found)


def _gathered(
    found: Sequence[_Client], notes: tuple[str, ...], seconds: float
) -> UpdateScores:
    first = found[0].scores

    def column(name: str) -> Tensor:
        return torch.tensor([getattr(c, name) for c in found], dtype=torch.float64)

    def rows(name: str) -> list[list[Value]]:
        return [c.scores.samples[name] for c in found]

    return UpdateScores(
        numbers={
            name: torch.tensor(
                [[v.number for v in row] for row in rows(name)], dtype=torch.float64
            )
            for name in first.samples
        },
        status={
            name: tuple(tuple(v.status for v in row) for row in rows(name))
            for name in first.samples
        },
        client_numbers={
            name: torch.tensor(
                [c.scores.client[name].number for c in found], dtype=torch.float64
            )
            for name in first.client
        },
        client_status={
            name: tuple(c.scores.client[name].status for c in found)
            for name in first.client
        },
        alpha=column("alpha"),
        similarity=column("similarity"),
        mismatch=column("mismatch"),
        noise_std=column("noise_std"),
        notes=notes,
        seconds=seconds,
    )
