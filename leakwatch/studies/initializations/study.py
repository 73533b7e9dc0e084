"""Which initialisation leaks least: I²F, Section 5.3, on a network of your own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from leakwatch.attacks import Attack
from leakwatch.attacks.start import StartKind
from leakwatch.checks import check_integer, check_number
from leakwatch.derivatives import Prepare
from leakwatch.models.initialization import Initializer, check_scheme, initialize
from leakwatch.normalization import Channels, check_normalization
from leakwatch.priors import GaussianPrior
from leakwatch.probes.checks import check_index
from leakwatch.reporting.quantities import PRIOR
from leakwatch.scores import resolve
from leakwatch.scores.api import PriorName
from leakwatch.scores.measure.plan import DEFAULT_PRODUCTS, Solver
from leakwatch.studies.cells import CellStore, Work, run_cells
from leakwatch.studies.initializations.measure import Measuring
from leakwatch.studies.initializations.points import Point
from leakwatch.studies.initializations.result import InitializationComparison
from leakwatch.studies.noise.spectra import INVERSE_SUM, RESOLVED_RANK, described
from leakwatch.studies.paper_attacks import engine, squared_error

#: The four of I²F, Section 5.3, and two more.
SCHEMES: Final = ("uniform", "normal", "kaiming", "xavier", "orthogonal", "pytorch")

_SCORES: Final = ("lavp", "i2f", "grad_norm", "loss", "leaked_bits")

#: What ``compare_initializations`` calls after the first measurement.
Train = Callable[[nn.Module], object]


def compare_initializations(
    module: nn.Module,
    x: Float[Tensor, "n ..."],
    y: Int[Tensor, " n"],
    schemes: Sequence[str | Initializer] = SCHEMES,
    *,
    seeds: int | Sequence[int] = 3,
    noise_std: float = 1e-2,
    attacks: Sequence[str | Attack] = ("dgl", "gs"),
    steps: int = 300,
    repeats: int = 3,
    start: StartKind = "normal",
    radius: float = 0.1,
    train: Train | None = None,
    mean: Channels | None = None,
    std: Channels | None = None,
    data_range: float = 1.0,
    prior_std: float | None = None,
    prior: PriorName | GaussianPrior | None = None,
    prepare: Prepare | None = None,
    epsilon: float = 0.0,
    solver: Solver = "auto",
    products: int = DEFAULT_PRODUCTS,
    dtype: torch.dtype = torch.float64,
    index: Sequence[int] | None = None,
    class_names: Sequence[str] | None = None,
    progress: Callable[[str], object] | None = None,
    n_jobs: int | None = None,
    keep_cells: str | Path | None = None,
) -> InitializationComparison:
    """Compares what gradients give away when a network starts in different ways.

    Copies of the module are initialised by each scheme under each seed. At each, all
    samples are scored and attacked under one Gaussian noise: the experiment of I²F
    (Zhang et al., NeurIPS 2023), Section 5.3 and Figure 7, with the scores beside it.

    Args:
        module: the network; left as it was. ``forward(x)`` gives logits.
        x: the same samples for all, network inputs.
        y: their class indices.
        schemes: names that :func:`leakwatch.models.initialize` knows, or functions
            ``(module, generator) -> None`` that change a module in place; these are
            called by their ``__name__``.
        seeds: of the weights; a number stands for 0, 1, 2, …
        noise_std: standard deviation of the noise on each entry of the gradient, in
            gradient units, for scores and attacks alike.
        attacks: ``"dgl"`` and ``"gs"`` as in I²F, names of presets, or attack objects;
            none for a quick look.
        steps: of each attack.
        repeats: how often each sample is attacked, each time with another start and
            another noise.
        start: where attacks begin: ``"normal"``, ``"uniform"``, ``"zeros"``, or
            ``"near"`` the truth.
        radius: distance of a near start, network-input units.
        train: called with each network after it was measured; then it is measured
            again. Draws from the global generator, which is seeded for it.
        mean: per channel mean of the normalisation that made ``x``.
        std: per channel standard deviation of it.
        data_range: largest pixel value, the smallest being 0.
        prior_std: R of the Bayesian scores, pixel units; see :func:`leakwatch.score`.
        prior: what their attacker knows of images; the same.
        prepare: what becomes of a batch of ``x`` before the network gets it, a
            differentiable function. ``train`` sees to it itself.
        epsilon: damping of I²F.
        solver: as in :func:`leakwatch.score`.
        products: the same.
        dtype: arithmetic of the scores; small eigenvalues decide, so float64. Attacks
            are in float32.
        index: data-set indices of the samples. Default: 0, 1, 2, …
        class_names: for the report.
        progress: called with a line of text after each network.
        n_jobs: processes among which networks are divided, as of ``joblib.Parallel``;
            ``None``: as ``joblib.parallel_config`` says, which may name a cluster, else
            this process. Values don't depend on it, to the bit: each process computes
            with as many threads as this one.
        keep_cells: folder in which the values of each finished network are kept. What
            is there already is not computed again, so that a study that was killed
            goes on; see :class:`leakwatch.studies.cells.CellStore`.

    Returns:
        All values, and what follows from them.

    Raises:
        TypeError: for a scheme or an attack of a wrong kind.
        ValueError: for bad arguments; quotes them.

    Example:
        >>> net = nn.Sequential(nn.Linear(4, 6), nn.Sigmoid(), nn.Linear(6, 3))
        >>> x = torch.rand(4, 4, generator=torch.Generator().manual_seed(0))
        >>> found = compare_initializations(net, x, torch.tensor([0, 1, 2, 0]),
        ...                                 ["normal", "xavier"], attacks=())
        >>> found.verdict("i2f_bayes_psnr").order
        'normal ≈ xavier'
    """
    named = _named(schemes)
    chosen = chosen_seeds(seeds)
    engines = [engine(a, steps) for a in attacks]
    if len({e.name for e in engines}) < len(engines):
        raise ValueError(
            f"attacks must have different names, got {[e.name for e in engines]}."
        )
    noise_std = check_number("noise_std", noise_std, example=1e-2)
    data_range = check_number("data_range", data_range, example=1.0)
    mean, std = check_normalization(mean, std, x, data_range)
    repeats = check_integer("repeats", repeats, example=3)
    samples = tuple(range(len(x))) if index is None else tuple(index)
    check_index(samples, len(x))
    scores = (*resolve(_SCORES), INVERSE_SUM, RESOLVED_RANK)
    pixels = {"mean": mean, "std": std, "data_range": data_range}
    measuring = Measuring(
        x=x,
        y=y,
        samples=samples,
        scores=scores,
        scoring={
            "noise_std": noise_std,
            "epsilon": epsilon,
            "prior_std": prior_std,
            "prior": prior,
            "prepare": prepare,
            "solver": solver,
            "products": products,
            "dtype": dtype,
            **pixels,
        },
        attacks=tuple(engines),
        attacking={
            "noise_std": noise_std,
            "prepare": prepare,
            "start": start,
            "radius": radius,
            **pixels,
        },
        repeats=repeats,
    )
    cells = [
        Work(
            name=f"{name}, seed {seed}",
            call=_at_network,
            arguments=(module, measuring, name, scheme, seed, train),
            key=(name, scheme, seed),
        )
        for name, scheme in named.items()
        for seed in chosen
    ]
    measured = run_cells(
        cells,
        n_jobs=n_jobs,
        store=None
        if keep_cells is None
        else CellStore(
            Path(keep_cells), (module, measuring, train), encode=_plain, decode=_points
        ),
        done=None
        if progress is None
        else lambda work, _: progress(f"{work.name}: done"),
    )
    return InitializationComparison(
        points=tuple(point for points in measured for point in points),
        schemes=tuple(named),
        seeds=chosen,
        samples=samples,
        quantities={
            **{s.name: described(s) for s in scores},
            **{f"{e.name}_mse": squared_error(e.name) for e in engines},
        },
        settings={
            "network": type(module).__name__,
            "noise_std": noise_std,
            "data_range": data_range,
            "prior": prior.knows if isinstance(prior, GaussianPrior) else PRIOR,
            "epsilon": epsilon,
            "attacks": [e.name for e in engines],
            "steps": steps,
            "repeats": repeats,
            "start": start,
            "dtype": str(dtype).removeprefix("torch."),
        },
        class_names=None if class_names is None else tuple(class_names),
    )


def _named(schemes: Sequence[str | Initializer]) -> dict[str, str | Initializer]:
    if isinstance(schemes, str) or not schemes:
        raise ValueError(
            f"schemes must be a list with at least one initialization, such as "
            f"['uniform', 'kaiming'], got {schemes!r}."
        )
    named: dict[str, str | Initializer] = {}
    for scheme in schemes:
        if isinstance(scheme, str):
            check_scheme(scheme)
            if scheme == "default":
                raise ValueError(
                    "scheme 'default' leaves the weights as they are, under every seed "
                    "the same; use 'pytorch', which draws PyTorch's default anew."
                )
        elif not callable(scheme):
            raise TypeError(
                "a scheme is a name or a function (module, generator) -> None, got "
                f"{scheme!r}."
            )
        name = scheme if isinstance(scheme, str) else getattr(scheme, "__name__", "own")
        if name in named:
            raise ValueError(f"there are two schemes named {name!r}; rename one.")
        named[name] = scheme
    return named


def chosen_seeds(seeds: int | Sequence[int]) -> tuple[int, ...]:
    """The seeds that a number of them, or a sequence, stands for.

    Args:
        seeds: a number n for 0 … n − 1, or different integers of at least 0.

    Raises:
        ValueError: for none, repeated or negative ones.
    """
    chosen = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    if not chosen or len(set(chosen)) < len(chosen) or min(chosen) < 0:
        raise ValueError(
            f"seeds must be a positive number of seeds, or different seeds of at least "
            f"0, got {seeds!r}."
        )
    return chosen


def _at_network(
    module: nn.Module,
    measuring: Measuring,
    name: str,
    scheme: str | Initializer,
    seed: int,
    train: Train | None,
) -> list[Point]:
    """All values at one network, before training and after it."""
    net = copy.deepcopy(module)
    initialize(net, scheme, seed)
    points = measuring.run(net, name, seed, "initial")
    if train is not None:
        _train(train, net, seed)
        points += measuring.run(net, name, seed, "trained")
    return points


def _plain(points: list[Point]) -> list[dict[str, Any]]:
    return [vars(point) for point in points]


def _points(plain: Any) -> list[Point]:
    return [Point(**fields) for fields in plain]


def _train(train: Train, net: nn.Module, seed: int) -> None:
    devices = {p.device for p in net.parameters() if p.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)):
        torch.manual_seed(seed)
        train(net)
