"""How much noise is enough, by prediction, and checked by an attack."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from leakwatch.checks import check_integer, check_number
from leakwatch.derivatives import Criterion, GradientMap, Prepare
from leakwatch.derivatives.parameter_filters import ParameterFilter
from leakwatch.normalization import Channels
from leakwatch.priors import GaussianPrior
from leakwatch.reporting.words import count, decibels, number
from leakwatch.scores import Value, score
from leakwatch.scores.api import PriorName
from leakwatch.scores.measure.plan import Solver
from leakwatch.status import Status
from leakwatch.studies.noise.check import Check, CheckAttack
from leakwatch.studies.noise.required import Enough, enough
from leakwatch.studies.noise.spectra import SpectrumKeeper

# How far attacks come above predictions in the middle, rounded up; see
# docs/measurements/attacks.md.
_MARGIN_DB: Final = 1.0
_HOPELESS: Final = (
    "the prior's mean image alone reaches {:.1f} dB on a sample, without any gradient, "
    "so no noise holds it to the target"
)


@final
@dataclass(frozen=True)
class ProbeNoise:
    """One probe.

    Attributes:
        sample: data-set index.
        label: class; None for other targets.
        needed: noise that holds it to the target by prediction, gradient units; where
            rounding leaves it open, the most that it can be. Its status says why there
            is none.
        psnr: predicted PSNR under the recommended noise, dB.
        noise_to_gradient: length of the recommended noise over that of the gradient,
            s√d_θ/‖g‖; NaN where it is not known.
    """

    sample: int
    label: int | None
    needed: Value
    psnr: Value
    noise_to_gradient: float


@final
@dataclass(frozen=True, eq=False)
class NoiseRecommendation:
    """The smallest Gaussian noise that holds the probes to a target.

    Attributes:
        noise_std: standard deviation on each entry of the gradient; NaN where the
            status is not usable.
        status: ``ok``: predicted, and an attack on the worst probes stayed below the
            target. ``estimated``: see the reason: not checked, raised after a check, or
            nothing learnt from it. ``unresolved``, ``undefined`` and so on: that of the
            probes that stand in the way. ``failed``: the attack came above the target.
        target_psnr: dB.
        share: of the probes, that is held to it.
        predicted: what the prediction alone asks for, before any check.
        aim: dB at which predictions are held: 1 below the target where attacks check
            them, lower after one came above the target.
        probes: most demanding first, unknown ones before all others.
        checks: attacks of the last round.
    """

    noise_std: float
    status: Status
    target_psnr: float
    share: float
    predicted: float
    aim: float
    probes: tuple[ProbeNoise, ...]
    checks: tuple[Check, ...] = ()

    def __str__(self) -> str:
        head = f"target {self.target_psnr:g} dB for {100 * self.share:g} % of "
        head += f"{count(len(self.probes), 'probe')}: "
        if self.status.usable:
            head += f"noise_std = {number(self.noise_std)}"
        else:
            head += "no noise can be recommended"
        lines = [f"{head} ({self.status})"]
        if self.status.usable and self.aim < self.target_psnr:
            lines.append(
                f"  predictions are held at {decibels(self.aim)}, below the target, "
                "since attacks come out a little above them"
            )
        ratios = [p.noise_to_gradient for p in self.probes]
        known = sorted(r for r in ratios if not math.isnan(r))
        if known and self.status.usable:
            lines.append(
                f"  the noise is {number(known[0])} to {number(known[-1])} times as "
                "long as the gradients; leakwatch trade-off shows what it costs"
            )
        return "\n".join([*lines, *(f"  {check}" for check in self.checks)])


def recommend_noise(
    module: nn.Module,
    x: Float[Tensor, "n ..."],
    y: Int[Tensor, " n"],
    *,
    target_psnr: float = 20.0,
    share: float = 1.0,
    check: int = 3,
    rounds: int = 3,
    slack: float = 0.5,
    radius: float = 0.1,
    seed: int = 0,
    time_limit: float | None = None,
    mean: Channels | None = None,
    std: Channels | None = None,
    data_range: float = 1.0,
    prior_std: float | None = None,
    prior_mean: Float[Tensor, "*sample"] | None = None,
    prior: PriorName | GaussianPrior | None = None,
    solver: Solver = "auto",
    dtype: torch.dtype = torch.float64,
    criterion: Criterion | None = None,
    prepare: Prepare | None = None,
    parameters: ParameterFilter | None = None,
    index: Sequence[int] | None = None,
    progress: Callable[[str], object] | None = None,
) -> NoiseRecommendation:
    r"""Finds the smallest Gaussian noise that holds probes to a predicted PSNR.

    The prediction is ``i2f_range_psnr``, that of an attacker who knows the range of
    pixels (``i2f_bayes_psnr`` where it is not known): it falls with the noise, so that
    a root on one spectrum per probe finds what each of them needs
    (``noise_std_for_range_psnr``), and the share that is to be held decides which of
    these is enough. A probe whose spectrum is not resolved counts as
    not held, and so does one that looks so much like the prior's mean image that this
    alone is above the target.

    Predictions are right to about a decibel, so they aim one below the target if
    attacks are to follow. Gauss-Newton then attacks the most demanding probes that are
    to be held, from near the truth, at the maximum of the posterior with the
    prediction's own prior, once without and once with knowledge of the pixels' range.
    Where it comes above the target by more than ``slack``, the target of the prediction
    is lowered by as much, and the check repeated.

    Args:
        module: the network; left as it was.
        x: probes, network inputs.
        y: class indices.
        target_psnr: dB that no attack should reach.
        share: of the probes, in (0, 1]; 1 holds the worst one.
        check: how many probes are attacked; 0 for the prediction alone.
        rounds: most rounds of attacks.
        slack: dB by which one attack may exceed the target by chance.
        radius: distance of the near start, network-input units.
        seed: of noise and starts of the check.
        time_limit: seconds after which each attack of the check is stopped; one that
            had not matched the gradient by then shows nothing.
        mean: per channel mean of the normalisation that made ``x``.
        std: per channel standard deviation of it.
        data_range: peak of the PSNR, pixel units.
        prior_std: R, pixel units; that of your data is better than the default.
        prior_mean: mean image, pixel units, for the attacker. Default: mid-grey.
        prior: instead of both, the statistics of images like yours
            (:func:`leakwatch.priors.measured_prior`) or of photographs (``"natural"``).
            An attacker who has data of the same kind needs more noise.
        solver: as in :func:`leakwatch.score`.
        dtype: arithmetic.
        criterion: as in :func:`leakwatch.score`.
        prepare: the same; attacks of the check know it too.
        parameters: which of them are shared.
        index: data-set indices. Default: 0, 1, 2, …
        progress: called with a line of text after the prediction and after each round
            of attacks, such as ``print``.

    Returns:
        The noise with its status; never a number that a usable status does not vouch
        for.

    Raises:
        ValueError: for bad arguments; quotes them.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(4, 6), nn.Sigmoid(), nn.Linear(6, 2))
        >>> found = recommend_noise(net, torch.rand(3, 4), torch.tensor([0, 1, 0]),
        ...                         target_psnr=15.0, check=0)
        >>> found.status.word, max(p.psnr.number for p in found.probes) <= 15.0
        ('estimated', True)
    """
    check_number("share", share, "(0, 1]", example=1)
    check_integer("check", check, smallest=0, example=3)
    check_integer("rounds", rounds, example=3)
    check_number("slack", slack, "[0, inf)", example=0.5)
    keeper = SpectrumKeeper()
    result = score(
        module,
        x,
        y,
        ["noise_std_for_psnr", keeper.score],
        target_psnr=target_psnr,
        mean=mean,
        std=std,
        data_range=data_range,
        prior_std=prior_std,
        prior_mean=prior_mean,
        prior=prior,
        solver=solver,
        dtype=dtype,
        criterion=criterion,
        prepare=prepare,
        parameters=parameters,
    )
    spectra = keeper.of(result)
    size = GradientMap(module, criterion, parameters=parameters).size
    names = tuple(range(len(x))) if index is None else tuple(index)
    attack = CheckAttack(
        module=module,
        x=x,
        y=y,
        index=names,
        prior_std=spectra[0].settings.prior_std if prior_std is None else prior_std,
        prior_mean=prior_mean,
        prior=spectra[0].settings.prior,
        size=size,
        radius=radius,
        seed=seed,
        time_limit=time_limit,
        spectra=spectra,
        sharing={
            "mean": mean,
            "std": std,
            "data_range": data_range,
            "criterion": criterion,
            "prepare": prepare,
            "parameters": parameters,
            "dtype": dtype,
        },
    )
    hopeless = {
        i: Status("undefined", _HOPELESS.format(psnr))
        for i, psnr in enumerate(attack.mean_image_psnr())
        if psnr > target_psnr
    }
    aim = target_psnr - (_MARGIN_DB if check else 0.0)
    first = enough(spectra, aim, share, hopeless)
    say = progress or (lambda line: None)
    found, attacked = "no noise is enough", min(check, len(first.held))
    if first.held:
        found = f"noise_std = {number(first.noise_std)}"
    then = f"; attacks on {attacked}" if attacked else ""
    say(f"predicted for {count(len(x), 'probe')}: {found}{then}")
    answer = _Answer(first, (), first.status, aim)
    if first.status.usable:
        answer = _checked(
            first, attack, target_psnr, aim, share, check, rounds, slack, hopeless, say
        )
    noise, status = answer.enough.noise_std, answer.status
    probes = [
        ProbeNoise(
            names[i],
            int(y[i]) if y.ndim == 1 and not y.is_floating_point() else None,
            first.needed[i],
            spectra[i].psnr(noise)
            if noise > 0
            else Value.without("not computed", "no noise is recommended"),
            noise * math.sqrt(size) / spectra[i].grad_norm
            if spectra[i].grad_norm > 0
            else math.nan,
        )
        for i in first.order
    ]
    return NoiseRecommendation(
        noise_std=noise if status.usable else math.nan,
        status=status,
        target_psnr=target_psnr,
        share=share,
        predicted=first.noise_std,
        aim=answer.aim,
        probes=tuple(probes),
        checks=answer.checks,
    )


class _Answer(NamedTuple):
    """What a round of attacks led to."""

    enough: Enough
    checks: tuple[Check, ...]
    status: Status
    aim: float


def _checked(
    first: Enough,
    attack: CheckAttack,
    target: float,
    aim: float,
    share: float,
    check: int,
    rounds: int,
    slack: float,
    hopeless: Mapping[int, Status],
    say: Callable[[str], object],
) -> _Answer:
    """Attacks, and asks for more noise where they come above the target."""
    if check == 0:
        status = Status("estimated", "predicted, not checked by an attack")
        return _Answer(first, (), status, aim)
    now = first
    checks: tuple[Check, ...] = ()
    for turn in range(1, rounds + 1):
        checks = attack.run(now.held[:check], now.noise_std)
        conclusive = [c.psnr - target for c in checks if c.conclusive]
        over = max(conclusive, default=0.0)
        best = f", the best at {target + over:.1f} dB" if conclusive else ""
        say(
            f"round {turn}, noise_std = {number(now.noise_std)}: {len(conclusive)} of "
            f"{count(len(checks), 'attack')} matched{best}"
        )
        if over <= slack:
            return _Answer(now, checks, _verdict(first, now, checks), aim)
        aim -= over
        more = enough(attack.spectra, aim, share, hopeless)
        if not more.status.usable:
            break
        now = more
    highest = max((c for c in checks if c.conclusive), key=lambda c: c.psnr)
    reason = (
        f"the attack reached {highest.psnr:.1f} dB on sample {highest.sample}, above "
        f"the target of {target:g} dB; ask for a higher target_psnr, allow more "
        "rounds, or give the prior of your data"
    )
    return _Answer(now, checks, Status("failed", reason), aim)


def _verdict(first: Enough, now: Enough, checks: tuple[Check, ...]) -> Status:
    blind = sum(not c.conclusive for c in checks)
    if blind:
        return Status(
            "estimated",
            f"{blind} of {count(len(checks), 'attack')} ended before the gradient was "
            "matched as far as the noise allows, and so show nothing",
        )
    if now is not first:
        factor = number(now.noise_std / first.noise_std)
        return Status(
            "estimated",
            f"{factor} times what was predicted, because attacks came above the target",
        )
    return now.status
