"""What a defense costs in accuracy, and what it buys against attacks."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from jaxtyping import Float, Int, Shaped
from torch import Tensor, nn

from leakwatch.attacks import Attack
from leakwatch.attacks.start import StartKind
from leakwatch.checks import check_function, check_integer, check_number
from leakwatch.defenses import Budget, Defense
from leakwatch.defenses.budget import Unit
from leakwatch.derivatives import Criterion, Prepare
from leakwatch.derivatives.runtime.rng_and_precision import isolated_rng
from leakwatch.normalization import Channels, check_normalization
from leakwatch.priors import GaussianPrior
from leakwatch.scores.api import PriorName, Scoring, as_prior
from leakwatch.status import OK, Status, describe_error
from leakwatch.studies.cells import CellStore, Work, run_cells
from leakwatch.studies.initializations.study import chosen_seeds
from leakwatch.studies.paper_attacks import engine
from leakwatch.studies.trade_offs.attack import ProbeAttack
from leakwatch.studies.trade_offs.grid import (
    MakeDefense,
    Setting,
    named_budgets,
    named_defenses,
    named_mixtures,
)
from leakwatch.studies.trade_offs.outcomes import ATTACKERS, Attacked, Attacker
from leakwatch.studies.trade_offs.result import TradeOff
from leakwatch.studies.trade_offs.rows import (
    Applied,
    Cell,
    TradeOffRow,
    decoded,
    encoded,
)
from leakwatch.studies.trade_offs.table import decibels

__all__ = ["Accuracy", "TrainUnder", "trade_off"]

TrainUnder: TypeAlias = Callable[[nn.Module, Defense | None, int], Applied | None]
"""Trains a network in place with what a defense shares in place of its gradients. The
last argument seeds the noise; order of data and dropout follow the global generators,
which are seeded the same for every defense."""

Accuracy: TypeAlias = Callable[[nn.Module], float]
"""Share of test samples that a network classifies correctly, in [0, 1]."""


def trade_off(
    module: nn.Module,
    x: Float[Tensor, "n ..."],
    y: Int[Tensor, " n"],
    train: TrainUnder,
    accuracy: Accuracy,
    *,
    defenses: Sequence[str] | Mapping[str, MakeDefense] = (
        "gaussian",
        "pruning",
        "eigen-diagonal",
        "eigen-smallest",
        "eigen-waterfill",
    ),
    budgets: Sequence[float | Budget] = (0.1, 1.0),
    unit: Unit = "relative",
    mixup: Sequence[float] = (),
    partners: tuple[Float[Tensor, "m ..."], Shaped[Tensor, "m ..."]] | None = None,
    queries: int = 1,
    seeds: int | Sequence[int] = 1,
    attack: str | Attack = "gauss-newton",
    steps: int = 40,
    attackers: Sequence[Attacker] = ("naive", "adaptive"),
    start: StartKind = "uniform",
    radius: float = 0.1,
    restarts: int = 1,
    directions: int = 50,
    box: float | None = None,
    mean: Channels | None = None,
    std: Channels | None = None,
    data_range: float = 1.0,
    prior_std: float | None = None,
    prior_mean: Float[Tensor, "*sample"] | None = None,
    prior: PriorName | GaussianPrior | None = None,
    criterion: Criterion | None = None,
    prepare: Prepare | None = None,
    index: Sequence[int] | None = None,
    class_names: Sequence[str] | None = None,
    progress: Callable[[str], object] | None = None,
    n_jobs: int | None = None,
    keep_cells: str | Path | None = None,
) -> TradeOff:
    """Trains one network under each defense and budget, and attacks what it shares.

    Every training begins with the same weights and sees the same data in the same
    order; training without a defense is always among them. Then the gradient of each
    sample is shared under the same defense and budget, a message of its own, as of a
    client with a single sample, and attacked by those who don't and who do know the
    defense. A cell that fails is recorded with its reason, and the others go on.

    Budgets are compared at equal ‖δ‖, as the unit states it: of a step's gradient in
    training, of a sample's in attacks. What was really applied is in the result.

    Args:
        module: the network with the weights that all begin with; left as it was.
            ``forward(x)`` gives logits.
        x: samples to attack, network inputs.
        y: their class indices.
        train: ``train(network, defense, seed)`` trains a copy of the network in place;
            ``defense`` is ``None`` for none. It may return what was really applied.
        accuracy: ``accuracy(network)`` on data that was not trained on.
        defenses: names that :func:`leakwatch.defenses.registered_defenses` lists, or
            functions of a :class:`leakwatch.defenses.Budget` by name.
        budgets: numbers in ``unit``, or budgets of one unit.
        unit: ``"relative"`` to ‖g‖, ``"norm"``, or ``"std"`` of each entry.
        mixup: coefficients α of :class:`leakwatch.defenses.MixUp`, each compared beside
            the defenses as ``"mixup"``; its ‖δ‖ follows from the samples and is
            measured. With coefficients ``defenses`` may be empty.
        partners: samples and labels that these are mixed with, in training and in
            attacks: public ones or others of the training data, none of them ``x``.
        queries: K, how often a server asks for the gradient of the same sample at the
            same weights. Attackers take the mean of the answers; who knows of mixtures
            attacks each, takes the partners off and then the mean.
        seeds: of data order and noise; a number stands for 0, 1, 2, …
        attack: ``"gauss-newton"``, another preset, or an attack object. Gauss–Newton
            without a prior gets that of the samples.
        steps: of the attack.
        attackers: ``"naive"``, ``"estimating"``, ``"adaptive"``: see
            :data:`leakwatch.studies.trade_offs.outcomes.Attacker`.
        start: where attacks begin; ``"near"`` is the worst case, in which directions
            that a message does not show stay near the truth unless a prior is told of
            noise. Who knows of mixtures begins near the mixture.
        radius: of a near start, network-input units.
        restarts: tries for each message.
        directions: how many ``eigen-smallest`` hides.
        box: R of ``eigen-waterfill`` and ``eigen-input_space``, pixel units. Default:
            ``prior_std``.
        mean: per channel, of the normalisation that made ``x``.
        std: the same. Defenses work in network-input units; predictions and ``box``
            are converted by the root mean square over channels.
        data_range: largest pixel value, the smallest being 0.
        prior_std: R of attackers and predictions, pixel units. Default: that of pixels
            uniform on their range.
        prior_mean: mean image, pixel units. Default: mid-grey.
        prior: instead of both, the statistics of images like yours
            (:func:`leakwatch.priors.measured_prior`) or of photographs
            (``"natural"``). Predictions are then the headline of every report, that of
            attackers who also know the range of pixels; of mixtures, and without a
            prior, they are of independent pixels.
        criterion: one loss per sample, see :class:`leakwatch.GradientMap`.
        prepare: what becomes of a batch of ``x`` before the network gets it, a
            differentiable function. ``train`` and ``accuracy`` see to it themselves.
        index: data-set indices of the samples. Default: 0, 1, 2, …
        class_names: for the report.
        progress: called with a line of text after each cell.
        n_jobs: processes among which cells are divided, as of ``joblib.Parallel``;
            ``None``: as ``joblib.parallel_config`` says, which may name a cluster, else
            this process. Values don't depend on it, to the bit: each process computes
            with as many threads as this one. ``train`` and ``accuracy`` are pickled.
        keep_cells: folder in which each finished cell is kept, those that failed
            excepted. What is there already is not computed again, so that a study that
            was killed goes on; see :class:`leakwatch.studies.cells.CellStore`.

    Returns:
        All cells, and what follows from them.

    Raises:
        TypeError: for a defense, budget or attack of a wrong kind.
        ValueError: for an unknown defense, an empty grid, budgets of several units, or
            other bad arguments; quotes them, before anything is trained.

    Example:
        >>> import torch
        >>> net = nn.Sequential(nn.Linear(4, 6), nn.Sigmoid(), nn.Linear(6, 3))
        >>> x = torch.rand(2, 4, generator=torch.Generator().manual_seed(0))
        >>> found = trade_off(net, x, torch.tensor([0, 2]), lambda *_: None,
        ...                   lambda _: 0.5, defenses=["gaussian"], budgets=[1.0])
        >>> [row.defense for row in found.summary]
        ['none', 'gaussian']
    """
    grid = named_budgets(budgets, unit)
    top = check_number("data_range", data_range, example=1.0)
    means, stds = check_normalization(mean, std, x)
    check_function("prepare", prepare, "prepare(x) → network inputs")
    assumed = Scoring(
        (),
        prior_std=prior_std,
        prior=as_prior(prior, x, prior_mean, top),
        data_range=top,
    ).settings(tuple(x.shape[1:]))
    known = assumed.prior
    spread = assumed.prior_std if known is None else known.std
    attacking = ProbeAttack(
        x=x,
        y=y,
        index=tuple(range(len(x))) if index is None else tuple(index),
        engine=engine(attack, steps),
        attackers=_chosen(attackers),
        start=start,
        radius=radius,
        restarts=check_integer("restarts", restarts),
        mean=means,
        std=stds,
        data_range=top,
        prior_std=spread,
        prior_mean=prior_mean,
        criterion=criterion,
        prior=known,
        prepare=prepare,
        queries=check_integer("queries", queries),
    )
    attacking.check(module)
    mixtures = named_mixtures(mixup, partners, x)
    if mixtures and partners is not None:
        attacking.check_partners(module, *partners)
    made: dict[str, MakeDefense] = {}
    if defenses or not mixtures:
        made = named_defenses(
            defenses,
            directions=directions,
            box=check_number("box", spread if box is None else box, example=0.25)
            / attacking.scale,
        )
    plan: list[tuple[Setting, Defense | None]] = [(Setting(), None)]
    plan += [
        (Setting(name, budget.value), make(budget))
        for name, make in made.items()
        for budget in grid
    ]
    plan += mixtures
    unit_of_grid = grid[0].unit
    measured = run_cells(
        [
            Work(
                name=f"{setting.words(unit_of_grid)}, seed {seed}",
                call=_cell,
                arguments=(module, train, accuracy, attacking, setting, seed, defense),
                key=(setting, seed, defense),
            )
            for seed in chosen_seeds(seeds)
            for setting, defense in plan
        ],
        n_jobs=n_jobs,
        store=None
        if keep_cells is None
        else CellStore(
            Path(keep_cells),
            (module, train, accuracy, attacking, unit_of_grid),
            encode=encoded,
            decode=decoded,
            worth=lambda cell: cell.status.usable,
        ),
        done=None
        if progress is None
        else lambda _, cell: progress(_line(cell, attacking.attackers, unit_of_grid)),
    )
    return TradeOff(
        cells=tuple(measured),
        attackers=attacking.attackers,
        unit=unit_of_grid,
        settings={
            "network": type(module).__name__,
            "attack": attacking.engine.name,
            "steps": steps,
            "start": start,
            "restarts": restarts,
            "samples": len(x),
            "queries": queries,
            "directions": directions,
            "box": spread if box is None else box,
            "prior_std": spread,
            "prior": assumed.knows,
            "unit": unit_of_grid,
        },
        class_names=None if class_names is None else tuple(class_names),
    )


def _cell(
    module: nn.Module,
    train: TrainUnder,
    accuracy: Accuracy,
    attacking: ProbeAttack,
    setting: Setting,
    seed: int,
    defense: Defense | None,
) -> Cell:
    """One cell; an exception becomes its status."""
    reached, applied = math.nan, None
    attacked: tuple[Attacked, ...] = ()
    status = OK
    try:
        net = copy.deepcopy(module)
        with isolated_rng(seed):
            applied = train(net, defense, seed)
        reached = float(accuracy(net))
        attacked = attacking.run(net, defense, seed)
    except Exception as error:
        status = Status("failed", describe_error(error))
    return Cell(
        setting.defense,
        setting.budget,
        seed,
        accuracy=reached,
        attacked=attacked,
        applied=applied,
        status=status,
        coefficient=setting.coefficient,
    )


def _chosen(attackers: Sequence[Attacker]) -> tuple[Attacker, ...]:
    named = (attackers,) if isinstance(attackers, str) else tuple(attackers)
    unknown = [who for who in named if who not in ATTACKERS]
    if unknown or not named:
        raise ValueError(
            f"attackers must be some of {', '.join(ATTACKERS)}, got {attackers!r}."
        )
    return tuple(who for who in ATTACKERS if who in named)


def _line(cell: Cell, attackers: tuple[Attacker, ...], unit: Unit) -> str:
    name = cell.setting.words(unit)
    if not cell.status.usable:
        return f"{name}, seed {cell.seed}: {cell.status}"
    row = TradeOffRow.of([cell], attackers, cell.seed)
    reached = ", ".join(f"{who} {decibels(row.psnr[who])}" for who in attackers)
    accuracy = f"accuracy {100 * cell.accuracy:.1f} %"
    return f"{name}, seed {cell.seed}: {accuracy}; attacks, dB: {reached}"
