"""LeakageMonitor: leakage scores of fixed samples, during training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Unpack

from leakwatch.callbacks._probing.options import ProbeOptions, with_options_of
from leakwatch.callbacks._probing.step import ProbeStep, Share, score_probes
from leakwatch.callbacks._recording.run_metadata import describe_scores
from leakwatch.callbacks.probe_callback import ProbeCallback
from leakwatch.checks import check_flag, check_number
from leakwatch.probes import ProbeSet
from leakwatch.reporting import Quantity

__all__ = ["LeakageMonitor"]


class LeakageMonitor(ProbeCallback):
    """Scores how exposed fixed training samples are, every N epochs.

    Add it to an existing Trainer and nothing else changes: training with the monitor
    is bit-identical to training without it. Before training and at the end of each
    N-th epoch (before validation, so that checkpoints and early stopping can use its
    metrics) it differentiates each probe's gradient in the input and computes scores.
    Values go to a ledger and an HTML report in the run's directory on local disk, and
    as scalars and tables to the Trainer's loggers. Pictures stay on local disk.

    In the first steps the gradient of training is compared with that of the criterion
    on the same batch, and the inputs of the training step with the probes. Where they
    differ there is one warning, and the report says it beside its headline: scores
    would be about a gradient that nobody shares.

    A mistake in the configuration raises before the first training step. Whatever goes
    wrong later becomes the status of the values concerned, with one warning; training
    goes on.

    ``ModelCheckpoint`` and ``EarlyStopping`` can monitor every key, logged or not, such
    as ``"leakwatch/psnr/worst"``, from the first batch on. In an epoch without a
    probe a key keeps its value. After a probe that failed it is NaN, never an old
    value; ``EarlyStopping`` stops on NaN unless told ``check_finite=False``.

    Args:
        probes: the samples to watch: a :class:`ProbeSet`, or how many to draw from the
            training data, stratified by class.
        scores: names or groups of scores: ``"lavp"``, ``"i2f"``, ``"bayes"``,
            ``"norms"``. The norm of the gradient and the loss are always recorded.
        every_n_epochs: how often; for other schedules override :meth:`should_probe`.
        at_start: also before the first training step, recorded as epoch 0.
        noise_std: standard deviation of the Gaussian noise assumed on each entry of a
            shared per-sample gradient, in gradient units. I²F and the predicted PSNR
            hold for that noise: give the noise that your training adds. If it adds
            none, keep the small default, close to an undefended gradient; a large
            noise that nobody adds makes every sample look safe.
        epsilon: damping of I²F, in units of the eigenvalues of H; 0 or more.
        prior: what the attacker of the predictions knows of images: ``"data"`` (mean
            and covariance of the data set, measured on up to 2,048 items),
            ``"natural"`` (the statistics of photographs), ``"white"`` (mean and spread
            of independent pixels), or a prior of :mod:`leakwatch.priors`. Default:
            ``"data"`` where it can be measured and no ``prior_std`` is given, since who
            runs the training may well have data of the same kind.
        prior_std: with ``prior="white"``, standard deviation of a pixel around the mean
            image, pixel units. Default: measured on the data.
        data_range: peak of the PSNR in pixel units. Default: 1 when ``mean`` and
            ``std`` are known or all inputs lie in [0, 1], else the range of the probes.
        mean: per channel, of the normalisation of the inputs. Default: from the
            datamodule, the data set or its transforms. A :class:`ProbeSet` has its own.
        std: as ``mean``.
        target_psnr: dB, for the score ``noise_std_for_psnr``.
        criterion: ``criterion(module, x, y)`` → one loss per sample. Default: accurate
            cross-entropy of ``module(x)``. ``"training_step"``: the loss that the
            module's own step returns for a batch ``[x, y]`` of one sample, for steps
            that have no other effect; in automatic optimisation.
        prepare: what becomes of a batch of inputs, as the data set has them, before the
            network gets it: a differentiable function. Everything is then about what
            goes into it. Default: the collate function of the training loader and the
            transfer hooks of module or datamodule, if probes are drawn and these treat
            each sample alone and draw nothing; a :class:`ProbeSet` holds what the
            network gets.
        solver: ``"auto"``, ``"exact"``, ``"lanczos"`` or ``"power"``.
        dtype: ``"float32"`` or ``"float64"``, whatever the training precision.
        max_memory: MiB for what stands for the Jacobian of one sample; above it
            ``"auto"`` takes products alone, with estimates and bounds for what needs
            the whole spectrum. A probe takes some 100 MiB besides, and five square
            matrices of the size of the input, 8 d_x² bytes each.
        products: most products with the Jacobian that this takes for each task, see
            :func:`leakwatch.score`. Fewer are faster, and their errors are larger.
        parameters: which parameters are shared, if not all that require gradients:
            names or patterns, such as ``"head"`` or ``["*.bias", "*lora*"]``.
        precision: ``"exact"`` looks at everything. ``"dashboard"`` takes a tenth of the
            time or less: for images of more than 256 elements it looks along the
            leading components of image statistics, where people recognise images. The
            predicted PSNR is then that of a linear network, and at little noise a
            bound, "at least" so much, which does not rank samples; smallest eigenvalues
            are not computed.
        budget: the share of training time that watching may take, such as 0.05. A probe
            step for which there is not enough time yet is left out; the record and the
            report say which. The first step always takes place. Default: any share.
        layers: also record which share of Σλ is in the gradient of each layer, with a
            heat map in the report. Takes
            ``precision="exact"``, beside which it costs nothing, and the exact solver.
        seed: of the drawing of probes.
        directory: of the ledger and the report. Default: ``name`` in the logger's
            directory. Never overwrites another run: where one is recorded already, a
            number is appended.
        report: write ``report.html`` when training ends, if plotly is installed.
        live: write it after probe steps of longer trainings too, where that costs
            less than 1 % of their time; an open page reads itself again.
        log: what loggers and ``trainer.callback_metrics`` get: ``"summary"``, about ten
            keys under ``leakwatch/``, or ``"all"``: those of classes and of every score
            too, under ``leakwatch-class/`` and ``leakwatch-detail/``. What a callback
            or scheduler has as its ``monitor`` is there in any case.
        log_images: send the probes' pictures to remote loggers. They are private data.
        log_ledger: send the record to W&B as an artifact when training ends; without
            pictures unless ``log_images`` sends them anyway.
        verbose: print a line after each probe step.
        name: first part of all log keys, and of the directory. Two monitors in one
            Trainer need two names.

    Raises:
        TypeError: for arguments of the wrong kind; at the start of training, for
            training data that no probes can be drawn from.
        ValueError: for values out of range; unknown scores; before anything runs,
            for probes that the module can't take, and ``parameters`` that match none.
        RuntimeError: in ``setup``, under a strategy that shards parameters, or for two
            monitors of one name; at the start of training, for a module whose gradient
            can't be differentiated in the input.

    Example:
        >>> from leakwatch.callbacks import LeakageMonitor
        >>> monitor = LeakageMonitor(every_n_epochs=5)
    """

    foretold = True

    @with_options_of(ProbeCallback)
    def __init__(
        self,
        probes: ProbeSet | int = 32,
        scores: Sequence[str] = ("lavp", "i2f"),
        *,
        at_start: bool = True,
        noise_std: float = 1e-4,
        parameters: str | Sequence[str] | None = None,
        layers: bool = False,
        precision: str = "exact",
        budget: float | None = None,
        name: str = "leakwatch",
        **options: Unpack[ProbeOptions],
    ) -> None:
        super().__init__(
            probes,
            scores,
            at_start=at_start,
            noise_std=noise_std,
            parameters=parameters,
            precision=precision,
            name=name,
            **options,
        )
        self.layers = check_flag("layers", layers)
        self.budget = None
        if budget is not None:
            self.budget = check_number("budget", budget, "(0, 1)", example=0.05)

    def measure(self, step: ProbeStep) -> Share:
        """Scores this process's part of the probes; raises no error."""
        scoring = self.scoring
        if self.layers:  # their shares are of the whole of H
            scoring = replace(scoring, precision="exact")
        return score_probes(step, scoring, layers=self.layers)

    def describe(self) -> dict[str, Quantity]:
        """Unit, direction, meaning and source of each score."""
        return describe_scores(self.scores)

    def arguments(self) -> dict[str, Any]:
        """All that changes what is measured."""
        own = {"layers": self.layers, "budget": self.budget}
        return super().arguments() | own

    def settled(self) -> dict[str, Any]:
        """The arguments that the record of a run states."""
        stated = {"layers": self.layers, "budget": self.budget}
        return super().settled() | {k: v for k, v in stated.items() if v}
