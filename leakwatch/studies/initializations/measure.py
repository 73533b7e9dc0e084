"""All that a comparison measures at one network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn

from leakwatch.attacks import Attack
from leakwatch.attacks.api import attack as run_attack
from leakwatch.quality import quality
from leakwatch.scores import score
from leakwatch.scores.registry import Score
from leakwatch.studies.initializations.points import Moment, Point


@final
@dataclass(frozen=True, eq=False)
class Measuring:
    """What is measured at each network, the same for all.

    Attributes:
        x: network inputs, ``(n, ...)``.
        y: class indices, ``(n,)``.
        samples: data-set indices.
        scores: which scores.
        scoring: keywords of :func:`leakwatch.score`.
        attacks: which attacks.
        attacking: keywords of :func:`leakwatch.attack`.
        repeats: how often each attack runs, with another start and noise each time.
    """

    x: Tensor
    y: Tensor
    samples: tuple[int, ...]
    scores: tuple[Score, ...]
    scoring: dict[str, Any]
    attacks: tuple[Attack, ...]
    attacking: dict[str, Any]
    repeats: int

    def run(
        self, net: nn.Module, scheme: str, seed: int, moment: Moment
    ) -> list[Point]:
        """Scores and attack errors of all samples at one network."""
        where = (scheme, seed, moment)
        points = self._scores(net, where)
        for attack in self.attacks:
            for repeat in range(self.repeats):
                points += self._errors(net, attack, repeat, where)
        return points

    def _scores(self, net: nn.Module, where: tuple[str, int, Moment]) -> list[Point]:
        result = score(net, self.x, self.y, self.scores, **self.scoring)
        return [
            Point(*where, sample, label, name, value, str(status))
            for name in result
            for sample, label, value, status in zip(
                self.samples,
                self.y.tolist(),
                result[name].tolist(),
                result.status[name],
                strict=True,
            )
        ]

    def _errors(
        self,
        net: nn.Module,
        attack: Attack,
        repeat: int,
        where: tuple[str, int, Moment],
    ) -> list[Point]:
        got = run_attack(net, self.x, self.y, attack, seed=repeat, **self.attacking)
        error = quality(
            got.images.cpu(),
            self.x.cpu(),
            metrics=("mse",),
            **{k: self.attacking[k] for k in ("mean", "std", "data_range")},
        )
        return [
            Point(
                *where,
                sample,
                label,
                f"{attack.name}_mse",
                value,
                str(status),
                repeat=repeat,
                matched=matched,
            )
            for sample, label, value, status, matched in zip(
                self.samples,
                self.y.tolist(),
                error["mse"].tolist(),
                error.status["mse"],
                got.matched,
                strict=True,
            )
        ]
