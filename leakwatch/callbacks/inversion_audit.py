"""InversionAudit: what attacks really rebuild, and whether the scores foresaw it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from leakwatch.attacks import Attack, presets
from leakwatch.attacks.base import BaseAttack
from leakwatch.attacks.registry import PublishedAttack
from leakwatch.callbacks._audit.conclusions import conclusions, sentence
from leakwatch.callbacks._audit.gradients import attack_probes
from leakwatch.callbacks._audit.plan import (
    METRICS,
    Audit,
    Kind,
    chosen,
    chosen_attack,
)
from leakwatch.callbacks._audit.quantities import describe_attacks
from leakwatch.callbacks._audit.sharing import defended
from leakwatch.callbacks._probing.options import ProbeOptions, with_options_of
from leakwatch.callbacks._probing.step import ProbeStep, Share, score_probes
from leakwatch.callbacks._recording.run_metadata import describe_scores
from leakwatch.callbacks.probe_callback import ProbeCallback
from leakwatch.checks import check_function, check_integer, check_number
from leakwatch.derivatives import GradientMap
from leakwatch.derivatives.runtime.rng_and_precision import isolated_rng
from leakwatch.probes import ProbeSet
from leakwatch.quality import check_metrics
from leakwatch.reporting import Quantity, Row

__all__ = ["InversionAudit"]


class InversionAudit(ProbeCallback):
    """Attacks fixed training samples every N epochs and compares with their scores.

    A score that nobody checks is a belief. At each audit every chosen probe's gradient
    is computed as a client would share it, and inverted twice: by a *worst-case*
    attack that starts beside the true sample, which is what I²F and the Bayesian score
    speak of, and by a *practical* attack that starts at noise, which is what an
    attacker can do today. Both are told apart in every key, table and picture.

    Recorded are the quality of each reconstruction, how far the gradient was matched, a
    verdict, the best constant image and the mean image as baselines, the scores, and
    the rank correlation of every score with what the attacks achieved. An attack that
    did not match the gradient is inconclusive: that is its status, not safety.

    Everything else is as in :class:`leakwatch.callbacks.LeakageMonitor`: training is
    left alone, failures become statuses, pictures stay on local disk.

    Args:
        probes: the samples to audit, or how many to draw from the training data; they
            are the audit's own, not those of a monitor beside it.
        attack: the practical attack: a preset such as ``"inverting-gradients"``, an
            attack object, or ``None`` for none. See ``leakwatch.attacks``.
        worst_case: the attack from a near start, as ``attack``.
        steps: of the practical attack; default: the preset's.
        restarts: of the practical attack; default: the preset's.
        radius: of the near start, x* + radius · sign(N), network-input units.
        samples: how many of the probes to score and to attack, evenly by class;
            ``None`` for all. A correlation with the scores takes 8 conclusive attacks.
        scores: names or groups of scores to compare with.
        metrics: of quality: ``"mse"``, ``"rmse"``, ``"psnr"``, ``"ssim"``,
            ``"lpips_vgg"``, ``"lpips_alex"``, ``"lpips_squeeze"``, ``"fsim"``.
        perturb: a defense that acts on the gradients, ``(n, d_θ)`` → what is shared.
        time_limit: seconds that the attacks of one audit may take together, in each
            process; ``None`` for no limit. The worst-case attack goes first and gets
            half, the practical one what is left: the strongest attack is the default,
            and takes as many steps as fit. Scores and quality take their time on top.
        every_n_epochs: how often; for other schedules override ``should_probe``.
        at_start: also before the first training step.
        noise_std: standard deviation of Gaussian noise that is added to the gradients
            which are attacked, and for which the scores hold.
        epsilon: as in the monitor, like all that follow.
        prior: of the scores, and of attacks that use a Gaussian prior.
        prior_std: the same, with ``prior="white"``.
        data_range: peak of the PSNR.
        mean: of the normalisation.
        std: of the normalisation.
        target_psnr: for the score ``noise_std_for_psnr``.
        criterion: one loss per sample, or ``"training_step"``.
        prepare: what becomes of a batch of inputs before the network gets it.
        solver: of the scores.
        precision: of the scores, as in the monitor; an audit looks at everything.
        dtype: of the scores and of first-order attacks.
        max_memory: MiB for the Jacobian of one sample.
        products: see :class:`leakwatch.callbacks.LeakageMonitor`.
        seed: of probes, noise and starts.
        directory: of the ledger and the report.
        report: write ``report.html`` when training ends.
        live: as in the monitor.
        log_images: send originals and reconstructions to remote loggers.
        verbose: print a line after each audit.
        name: first part of all log keys, and of the directory.

    Raises:
        TypeError: for arguments of the wrong kind.
        ValueError: for values out of range; unknown attacks, scores or metrics.
        RuntimeError: as the monitor.

    Example:
        >>> from leakwatch.callbacks import InversionAudit
        >>> audit = InversionAudit(attack="inverting-gradients", steps=300,
        ...                        samples=8, every_n_epochs=25)
    """

    @with_options_of(ProbeCallback)
    def __init__(
        self,
        probes: ProbeSet | int = 32,
        attack: str | Attack | None = "combined",
        worst_case: str | Attack | None = "gauss-newton",
        *,
        steps: int | None = None,
        restarts: int | None = None,
        radius: float = 0.01,
        samples: int | None = None,
        scores: Sequence[str] = ("lavp", "i2f"),
        metrics: Sequence[str] = METRICS,
        perturb: Callable[[Tensor], Tensor] | None = None,
        time_limit: float | None = 120.0,
        at_start: bool = False,
        noise_std: float = 1e-4,
        precision: str = "exact",
        name: str = "leakwatch-audit",
        **options: Unpack[ProbeOptions],
    ) -> None:
        super().__init__(
            probes,
            scores,
            at_start=at_start,
            noise_std=noise_std,
            precision=precision,
            name=name,
            **options,
        )
        check_function("perturb", perturb, "from gradients (n, d_θ) to what is shared")
        near = None if worst_case is None else _attack("worst_case", worst_case)
        random = None if attack is None else _attack("attack", attack, steps)
        attacks: dict[Kind, Attack] = {}
        if near is not None:
            attacks["near"] = near.attack
        if random is not None:
            attacks["random"] = random.attack
        if not attacks:
            raise ValueError(
                "attack and worst_case are both None, so there is nothing to audit; "
                "for instance attack='inverting-gradients'."
            )
        if restarts is not None:
            restarts = check_integer("restarts", restarts, example=3)
        if samples is not None:
            samples = check_integer("samples", samples, example=8)
        if time_limit is not None:
            time_limit = check_number("time_limit", time_limit, example=60.0)
        tries = 1 if random is None else random.restarts
        self.audit = Audit(
            attacks,
            samples,
            start="normal" if random is None else random.start,
            restarts=restarts or tries,
            radius=check_number("radius", radius, example=0.01),
            noise_std=float(noise_std),
            perturb=perturb,
            metrics=check_metrics(metrics),
            time_limit=time_limit,
            seed=self.seed,
        )
        self.attacking = self.audit.time_limit or 0.0

    def measure(self, step: ProbeStep) -> Share:
        """Scores and attacks this process's part of the chosen; raises no error."""
        # Scores that no attack checks are a monitor's, and would take most of the time.
        picked = chosen(step.probes, self.audit.samples)
        step = replace(step, probes=step.probes.select(picked))
        share = score_probes(step, self.scoring)
        attack_probes(step, self.audit, share)
        return share

    def examine(
        self, module: nn.Module, gradients: GradientMap, probes: ProbeSet
    ) -> None:
        """Refuses attacks and defenses that can't work on this network.

        Raises:
            TypeError: for a defense that returns no tensor.
            ValueError: for one that changes the shape, or a BatchNorm prior without
                BatchNorm.
        """
        for attack in self.audit.attacks.values():
            if isinstance(attack, BaseAttack):
                attack.check(module)
        if self.audit.perturb is not None:
            with isolated_rng():
                defended(self.audit.perturb, torch.zeros(1, gradients.size))

    def conclude(self, rows: Sequence[Row], epoch: int, step: int) -> list[Row]:
        """Shares of matched and recovered samples, and correlations with the scores."""
        predictors = [*(score.name for score in self.scores), "image_std", "image_tv"]
        return conclusions(
            rows,
            predictors,
            list(self.audit.attacks),
            self.audit.metrics,
            epoch=epoch,
            step=step,
        )

    def describe(self) -> dict[str, Quantity]:
        """Unit, direction, meaning and source of each quantity."""
        names = {kind: attack.name for kind, attack in self.audit.attacks.items()}
        attacked = describe_attacks(names, self.audit.metrics)
        return {**describe_scores(self.scores), **attacked}

    def sentence(self, rows: Sequence[Row]) -> str | None:
        """What the attacks achieved, in one line."""
        return sentence(rows, list(self.audit.attacks))

    def arguments(self) -> dict[str, Any]:
        """All that changes what is measured."""
        return super().arguments() | {"audit": vars(self.audit), "labels_known": True}

    def settled(self) -> dict[str, Any]:
        """The arguments that the record of a run states."""
        audit = self.audit
        return super().settled() | {
            "attacks": {kind: attack.name for kind, attack in audit.attacks.items()},
            "metrics": list(audit.metrics),
            "restarts": audit.restarts,
            "radius": audit.radius,
            "samples": audit.samples,
            "defense": None if audit.perturb is None else _name(audit.perturb),
        }


def _name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _attack(
    argument: str, value: Any, steps: int | None = None
) -> PublishedAttack[Any]:
    """As :func:`chosen_attack`; no generator beside the true images."""
    preset = chosen_attack(
        argument,
        value,
        steps,
        presets.get,
        example="inverting-gradients",
        optional=True,
    )
    attack = preset.attack
    if argument == "worst_case" and getattr(attack, "only_normal_start", False):
        raise ValueError(
            f"worst_case begins beside the true images, and {attack.name} only at "
            f"random latents; use it as attack=, and worst_case='gauss-newton'."
        )
    return preset
