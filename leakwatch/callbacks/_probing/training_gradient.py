"""Whether what training shares is what is scored: its gradient, and its inputs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import Optimizer

from leakwatch.callbacks._probing.class_weights import (
    SAME,
    ClassWeights,
    LossFactors,
    Piece,
)
from leakwatch.callbacks._probing.distributed import gather
from leakwatch.callbacks._probing.observing import observing
from leakwatch.callbacks._probing.preparation import Preparation, samples_of
from leakwatch.callbacks._probing.training_step import whole_training_step
from leakwatch.callbacks._recording.recorder import Warn
from leakwatch.derivatives import GradientMap, Prepare, underlying
from leakwatch.derivatives.runtime import SampleLoss, as_evaluated
from leakwatch.derivatives.runtime.own_streams import OwnStreams, own_streams_kept
from leakwatch.derivatives.runtime.rng_and_precision import (
    isolated_rng,
    state_of_streams,
)
from leakwatch.status import describe_error

__all__ = ["TrainingComparison", "Verdict", "inputs_differ", "verdict"]

# Messages, counted from the first of a fit(), whose gradients are compared: some, since
# two losses can agree where weights are zero, and where training is not begun.
_COMPARED = (0, 1, 3, 10, 30, 100)
# Shares of a gradient's norm that rounding may change, below a scale by which anybody
# would multiply a loss.
_ROUNDING, _ROUNDING_HALF = 0.01, 0.1
# Where a factor or weights of classes explain a gradient, no more is left than rounding
# changes in that of a multiple of the loss: 0.7 to 1.4 times as much in networks of up
# to 53 layers, float32 and bfloat16. Another loss leaves more.
_MULTIPLE, _LEFT, _LEAST = 1.3, 5.0, 1e-5
# Two draws of dropout are apart by their spread; few are by twice that.
_SPREAD = 2.0
# Spreads between images by which the averages of probes and of a batch may differ.
_FAR, _FAR_BY_CHANCE = 1.5, 6.0
# How many times nearer a batch is to one of two sets of images, by no chance.
_NEARER = 3.0

# Samples on which modes are compared, and the share of a loss that a mode may change.
_FEW, _MODES = 8, 1e-3
# Below this loss torch's cross-entropy leaves its float32 gradient too few digits.
_CONFIDENT = 1e-3
# Classes in a batch up to which they are taken apart.
_MOST_CLASSES = 64
# Numbers of a gradient that are kept of each class, and of all in all pieces.
_KEPT, _KEPT_IN_ALL = 2**14, 2**24

_T = TypeVar("_T")


@final
@dataclass(frozen=True)
class Verdict:
    """How the gradient of training compares with that of the criterion.

    Attributes:
        agrees: whether they are equal up to ``factor``.
        factor: by which training's is longer.
        gap: share of its norm that no factor explains.
    """

    agrees: bool
    factor: float
    gap: float


@final
@dataclass(frozen=True)
class _Gradients:
    """The criterion's, by id of parameter.

    Attributes:
        mean: of the batch.
        pieces: of each batch of the message, where that is asked for: the number of
            samples of each class, and what they add to some entries of the mean.
        streams: the state in which the last batch left random streams.
        rounding: norm of what rounding changes in the mean.
        weights: of which they are, by name, where the criterion draws.
    """

    mean: dict[int, Tensor]
    pieces: tuple[tuple[Counter[int], dict[int, dict[int, Tensor]]], ...] = ()
    streams: bytes = b""
    rounding: float = 0.0
    weights: dict[str, Tensor] | None = None

    def added(self, other: _Gradients) -> _Gradients:
        """With those of another part of a message."""
        mean = {k: g + other.mean[k] for k, g in self.mean.items() if k in other.mean}
        return _Gradients(
            mean,
            self.pieces + other.pieces,
            other.streams,
            self.rounding + other.rounding,
            other.weights,
        )


@final
@dataclass
class _Consumed:
    """What an optimiser is about to consume, or several of the same gradient.

    Attributes:
        step: optimiser steps before the first.
        gradients: by id of parameter.
        scale: by which losses were multiplied.
        held: whether any parameter had a gradient.
        spent: whether a backward pass came after the first step.
    """

    step: int
    gradients: dict[int, Tensor]
    scale: float = 1.0
    held: bool = False
    spent: bool = False


def _of_torch(part: nn.Module) -> bool:
    """Whether a module is a layer of torch, or a normalisation derived from one."""
    batch_norm = isinstance(part, nn.modules.batchnorm._NormBase)
    return batch_norm or type(part).__module__.startswith("torch.")


class _NotHereError(Exception):
    """A process, this or another one, could not do its part, for a reason in words."""


def _some(gradient: Tensor, every: int) -> Tensor:
    return gradient.reshape(-1)[::every]


def _every(trainer: Trainer, numbers: int) -> int:
    """Of how many entries one is kept to tell weights of classes."""
    pieces = max(trainer.accumulate_grad_batches, 1) * trainer.world_size
    kept = min(_KEPT, max(_KEPT_IN_ALL // (_MOST_CLASSES * pieces), 1))
    every = max(-(-numbers // kept), 1)
    while every > 1 and (every % 2 == 0 or every % 3 == 0):
        every += 1  # not always the same place of a kernel
    return every


def _classes(y: Tensor) -> bool:
    """Whether labels are classes, and few enough to be taken apart."""
    plain = y.ndim == 1 and not (y.is_floating_point() or y.is_complex())
    return plain and len(set(y.tolist())) <= _MOST_CLASSES


def _everywhere(trainer: Trainer, compute: Callable[[], _T]) -> _T:
    """What this process computes, once all others have done so too."""
    if trainer.world_size == 1:
        return compute()
    why = ""
    try:
        mine = compute()
    except Exception as error:
        why = describe_error(error)
    failures = [one for one in gather(trainer, why) if one]
    if failures:
        raise _NotHereError(failures[0])
    return mine


def verdict(
    training: Tensor, ours: Tensor, rounding: float, left: float, spread: float
) -> Verdict:
    """Compares two gradients.

    Args:
        training: the gradient that an optimiser consumes, ``(n,)``.
        ours: that of the criterion on the same batch, ``(n,)``.
        rounding: share of its norm by which it may be off.
        left: the same where a factor is to explain it.
        spread: norm of the difference of two draws of ours, for a network that draws.

    Example:
        >>> g = torch.tensor([3.0, 4.0])
        >>> verdict(2 * g, g, 0.01, 1e-4, 0.0)
        Verdict(agrees=True, factor=2.0, gap=0.0)
        >>> verdict(g.flip(0), g, 0.01, 1e-4, 0.0).agrees
        False
    """
    length, own = (float(g.double().norm()) for g in (training, ours))
    if length == 0 or own == 0:
        return Verdict(length == own, 1.0, float(length != own))
    factor = length / own
    gap = float((training.double() - factor * ours.double()).norm())
    drawn = _SPREAD * spread * factor
    if abs(length - own) <= rounding * length + drawn:
        factor, left = 1.0, rounding
    return Verdict(gap <= left * length + drawn, factor, gap / length)


def inputs_differ(probes: Tensor, batch: Tensor) -> str:
    """What tells the inputs of a batch from those of probes; empty if nothing does.

    Averages and spreads of single images are compared: another normalisation moves
    them by far more than images differ among each other.

    Args:
        probes: ``(n, ...)``, as the network gets them.
        batch: ``(b, ...)``, as the training step gets them.
    """
    if probes.shape[1:] != batch.shape[1:]:
        return (
            f"the training step gets inputs of shape {tuple(batch.shape[1:])}, and "
            f"probes have {tuple(probes.shape[1:])}"
        )
    ours, theirs = probes.double().flatten(1), batch.double().flatten(1)
    scale = float(torch.cat([ours.std(1), theirs.std(1)]).nan_to_num().max())
    chance = _FAR_BY_CHANCE * math.sqrt(1 / len(ours) + 1 / len(theirs))
    for a, b, least in (
        (ours.mean(1), theirs.mean(1), 0.02 * scale),
        *_log_spreads(ours, theirs),
    ):
        among = max(float(t.std(correction=0)) for t in (a, b)) + least
        if abs(float(a.mean() - b.mean())) > max(_FAR, chance) * among:
            found = [
                f"{float(t.mean()):.3g} ± {float(t.std(1).mean()):.3g}"
                for t in (theirs, ours)
            ]
            return (
                f"the training step gets inputs of {found[0]} (mean ± standard "
                f"deviation), and probes reach the network with {found[1]}"
            )
    return ""


def _nearer(probes: Tensor, moved: Tensor, batch: Tensor) -> bool:
    """Whether a batch is much nearer to probes as they are than to moved ones."""

    def place(images: Tensor) -> tuple[float, float]:
        flat = images.double().flatten(1)
        return float(flat.mean()), max(float(flat.std(1).mean()), 1e-12)

    mean, std = place(batch)
    away = [
        math.hypot((at - mean) / std, math.log(spread / std))
        for at, spread in (place(probes), place(moved))
    ]
    return _NEARER * away[0] < away[1]


def _log_spreads(
    ours: Tensor, theirs: Tensor
) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Of each image that is not constant; nothing where all are."""
    a, b = (t.std(1)[t.std(1) > 0].log() for t in (ours, theirs))
    if len(a) and len(b):
        yield a, b, 0.02


@final
class TrainingComparison:
    """Compares, in the first steps, what training computes with what is scored.

    The criterion's gradient is formed on the batch that the training step is about to
    get, in the state in which it gets it: modes, random streams, buffers, precision.
    Nothing of that is left behind. It is compared with the gradient that the optimiser
    is about to consume.

    Args:
        gradients: what is scored: module, criterion, preparation of probes.
        inputs: some probes, as they go into ``gradients``.
        given: whether the preparation is the user's, and may be what the training step
            does itself.
        whole: whether the criterion is the training step, which is then done for the
            whole batch: what hooks and optimisers make of its gradient is compared.
        prepared: what becomes of probes, and why that is not what training does to
            batches.
        classes: of the probes, whose weights matter; empty for other labels.
        tell: told, under a key, what differs.
        weigh: told by how much training multiplies losses, as soon as that is seen, and
            again where it turns out otherwise.
    """

    def __init__(
        self,
        gradients: GradientMap,
        inputs: Tensor,
        *,
        given: bool,
        whole: bool,
        prepared: Preparation,
        classes: frozenset[int],
        tell: Warn,
        weigh: Callable[[LossFactors], None],
    ) -> None:
        self._gradients = gradients
        self._inputs = inputs
        self._given = given
        self._whole = whole
        self._criterion = whole_training_step if whole else gradients.criterion
        self._left = True
        self._prepared = prepared
        self._classes = classes
        self._tell = tell
        self._weigh = weigh
        self._consumed: _Consumed | None = None  # in this batch
        self._begun = 0  # at this optimiser step
        # Whether processes have never taken a step in the same batch; None: not known.
        self._apart: bool | None = None
        self._messages = 0
        self._ours: list[_Gradients] = []
        self._drew: list[bool] = []  # of each way, the same numbers as training
        self._own = OwnStreams()  # of the module
        self._failure = ""  # of this process, until all know of it
        self._step = 0
        # Of each way, once no single factor explains training.
        self._weights: list[ClassWeights] | None = None
        self._unexplained = ""
        self._used, self._used_at = LossFactors(), 0
        self._last: tuple[Tensor, Tensor] | None = None
        self._due = False  # this message, in every process
        self._every = 1  # entry of a gradient is kept, to tell weights of classes
        self._factors: list[tuple[float, int]] = []
        self._compared = False
        self._one_mode = True  # as far as is known
        self._probed = False  # since the last message

    def probed(self) -> None:
        """Has the next message compared as well: there are new scores of its loss."""
        self._probed = True

    def before(self, trainer: Trainer, module: LightningModule, batch: Any) -> None:
        """Forms the criterion's gradient, before the training step has the batch.

        Args:
            trainer: the trainer.
            module: what is trained.
            batch: as the training step gets it.
        """
        self._consumed, self._begun = None, trainer.global_step
        if self._compared and not self._left:
            return
        alone = trainer.world_size == 1
        late = not alone and self._messages > _COMPARED[-1]
        due = self._messages in _COMPARED or self._waiting
        due |= self._probed and not late
        # Processes can't see each other's batches: all look, or none.
        more = bool(self._factors) and (alone or self._messages <= _COMPARED[-1])
        self._due = due or more
        if not self._due:
            return
        try:
            x, y = samples_of(batch)
            # What adds up over a batch is told by one of another size.
            if alone and not due and len(y) in {size for _, size in self._factors}:
                return
            if not self._compared:
                self._compared = True
                self._compare_inputs(module, x)
            if not self._left:
                return
            share = 1 / max(trainer.accumulate_grad_batches, 1)
            self._own = OwnStreams(module, self._criterion)
            iterators = self._own.iterators
            if self._whole:  # which reads loaders as well
                held = (
                    item for part in module.modules() for item in vars(part).items()
                )
                iterators = [
                    name for name, value in held if isinstance(value, Iterator)
                ]
            if iterators:
                raise _NotHereError(
                    f"the module holds an iterator ({iterators[0]}), and "
                    f"what it took from there would be missing in training"
                )
            self._last = x, y
            self._compare_draws()
            self._compare_modes(x, y)
            for i, prepare in enumerate(self._ways()):
                ours = self._gradient(trainer, module, x, y, prepare, share)
                if i == len(self._ours):
                    self._ours.append(ours)
                else:
                    self._ours[i] = self._ours[i].added(ours)
        except Exception as error:
            why = str(error) if isinstance(error, _NotHereError) else ""
            self._failure = why or describe_error(error)  # others wait for this process
            if alone:
                self._give_up(self._failure)

    def look(
        self, trainer: Trainer, module: LightningModule, optimizer: Optimizer | None
    ) -> None:
        """Keeps the gradient that is there now, until the batch ends.

        Processes may take different ways through a batch, so none waits here.

        Args:
            trainer: the trainer.
            module: what is trained.
            optimizer: which is about to consume it; ``None`` for all parameters.
        """
        consumed = self._consumed
        if consumed is None:
            self._compare_draws()
            consumed = self._consumed = _Consumed(trainer.global_step, {})
        elif module.automatic_optimization or trainer.global_step == consumed.step:
            return  # a closure that is called again
        elif consumed.spent:
            self._tell(
                "steps",
                "a training step takes several optimiser steps, each with a gradient "
                "of its own; who shares them shares more than scores are about, which "
                "are of the criterion's gradient alone",
            )
            return
        if self._due and self._left and self._ours:
            try:
                self._keep(trainer, module, optimizer, consumed)
            except Exception as error:
                self._failure = describe_error(error)

    def backward(self) -> None:
        """Notes a backward pass."""
        if self._consumed is not None:
            self._consumed.spent = True

    def _keep(
        self,
        trainer: Trainer,
        module: LightningModule,
        optimizer: Optimizer | None,
        consumed: _Consumed,
    ) -> None:
        parameters = list(module.parameters())
        if optimizer is not None:
            parameters = [p for g in optimizer.param_groups for p in g["params"]]
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            consumed.scale = 1.0 if scaler is None else scaler.get_scale()
        for p in parameters:
            if all(id(p) in g.mean for g in self._ours):
                none = p.grad is None
                kept = torch.zeros_like(p) if none else p.grad.clone()  # type: ignore[union-attr]
                consumed.gradients.setdefault(id(p), kept)
                consumed.held |= not none

    def after(self, trainer: Trainer, module: LightningModule) -> None:
        """Compares at the end of a batch, where every process comes.

        Args:
            trainer: the trainer.
            module: what is trained.
        """
        manual, alone = not module.automatic_optimization, trainer.world_size == 1
        stepped = manual or trainer.global_step > self._begun
        over = not alone and self._messages > _COMPARED[-1]
        if not self._left or not stepped or over:
            return
        within = self._consumed is not None
        held = any(p.grad is not None for p in module.parameters())
        if manual and held and not within:
            self.look(trainer, module, None)  # a step went past Lightning
        consumed, self._consumed = self._consumed, None
        told = gather(trainer, (within, consumed is not None))
        ours, self._ours = self._ours, []
        drew, self._drew = self._drew, []
        last, self._last = self._last, None
        self._step = self._begun if consumed is None else consumed.step
        if any(looked for _, looked in told):
            self._messages += 1
            self._probed = False
            together = all(looked for _, looked in told)
            if self._due and not together and self._apart is None:
                self._apart = True
            if self._due and together:
                self._apart = False
                try:
                    if ours and self._messages == 1:
                        self._compare_parameters(trainer, module, ours[0])
                    self._compare(trainer, module, consumed, ours, drew, last)
                except _NotHereError as error:
                    self._give_up(str(error))
                except Exception as error:
                    self._give_up(describe_error(error))
        elif manual and self._messages == 0:
            self._give_up(
                "no optimiser of Lightning's has taken a step, and no gradient is left"
            )
        if manual and not any(step for step, _ in told):
            self._say_unexplained()
            self._left = False

    def finish(self) -> None:
        """Says what was waiting for a second look."""
        if self._left:
            if self._factors:
                self._tell_factor(*self._factors[-1])
            self._tell_weights()
            self._say_unexplained()
            if self._apart:
                self._give_up("processes take optimiser steps in different batches")

    @property
    def _waiting(self) -> bool:
        """For classes of probes whose weights are not known yet."""
        return (
            self._left
            and self._messages < _COMPARED[-1]
            and any(
                w.possible
                and w.how != "average"
                and not (w.weights and self._classes <= w.weights.keys())
                for w in self._weights or ()
            )
        )

    # -- inputs ----------------------------------------------------------------------

    def _ways(self) -> list[Prepare | None]:
        """What may be left to do to a batch that the training step gets."""
        given = self._gradients.prepare if self._given else None
        return [None] if given is None else [given, None]

    def _compare_inputs(self, module: LightningModule, x: Tensor) -> None:
        prepare = self._gradients.prepare
        ours = self._inputs.to(x.device)
        reach = [ours] if prepare is None or self._given else []
        if prepare is not None:
            with observing(module), as_evaluated(module), torch.no_grad():
                reach.append(prepare(ours.clone()))
        texts = [inputs_differ(each, x.detach()) for each in reach]
        (_, why, moved), self._prepared = self._prepared, Preparation()
        text = ""
        if all(texts):
            text = f"{texts[-1]} ({why})" if why else texts[-1]
        elif moved is not None and not _nearer(reach[-1], moved, x.detach()):
            found = [
                f"{float(t.mean()):.3g} ± {float(t.flatten(1).std(1).mean()):.3g}"
                for t in (reach[-1].double(), moved.double())
            ]
            text = (
                f"{why} and turns inputs of {found[0]} (mean ± standard deviation) "
                f"into {found[1]}, which probes don't go through"
            )
        if text:
            self._tell(
                "inputs",
                f"{text}, so scores are not about what training shares; "
                f"pass prepare=, a function that does to a batch of inputs what "
                f"training does to them, as far as that is not random, or a ProbeSet "
                f"of inputs that are prepared",
            )

    def _compare_modes(self, x: Tensor, y: Tensor) -> None:
        """Whether the network is another one in evaluation mode, as it is scored.

        Torch's own layers may be: dropout, and normalisation by statistics. Nothing is
        found out about a forward that draws, or that this criterion can't be used for.
        """
        if not self._one_mode:
            return
        criterion = self._gradients.criterion
        prepare = self._gradients.prepare if self._given else None
        inner = underlying(self._gradients.module)
        loss = SampleLoss(inner, criterion, prepare)
        modes = [(part, part.training) for part in loss.modules()]

        def of_each() -> Tensor:
            own = {name: b.clone() for name, b in loss.named_buffers()}
            return loss.batch(own, x[:_FEW].clone(), y[:_FEW].clone()).double()

        with observing(inner, criterion), as_evaluated(loss), torch.no_grad():
            try:
                evaluated = of_each()
                for part, training in modes:
                    part.training = training and not _of_torch(part)
                before = self._streams()
                trained, again = of_each(), of_each()
                if self._streams() != before or not torch.equal(trained, again):
                    return
            except Exception:
                return
        size = torch.maximum(evaluated.abs(), trained.abs()).clamp_min(1e-30)
        apart = float(((trained - evaluated).abs() / size).max())
        if apart > _MODES:
            self._one_mode = False
            self._tell(
                "modes",
                f"in evaluation mode, in which it is scored, the network computes "
                f"another loss than in training (by up to {100 * apart:.2g}%, layers "
                f"of torch apart), so scores are not about what training shares: let "
                f"forward do the same in both modes, or pass criterion=, a function "
                f"(module, x, y) that does what training does",
            )

    def _compare_draws(self) -> None:
        """Whether training left random streams as the criterion did, batch by batch."""
        now = self._streams() if self._ours else b""
        before = self._drew or [True] * len(self._ours)
        self._drew = [
            drew and ours.streams == now
            for drew, ours in zip(before, self._ours, strict=True)
        ]

    def _compare_parameters(
        self, trainer: Trainer, module: LightningModule, ours: _Gradients
    ) -> None:
        """Whether training updates all parameters whose gradients are scored."""
        groups = [group for o in trainer.optimizers for group in o.param_groups]
        trained = {id(p) for group in groups for p in group["params"]}
        scored = self._gradients.sizes()
        left = [
            name
            for name, p in underlying(module).named_parameters()
            if trained and id(p) not in trained and id(p) in ours.mean
            if name in scored and bool(ours.mean[id(p)].any())
        ]
        if left:
            self._tell(
                "parameters",
                f"scores are of the gradients of parameters that no optimiser has "
                f"({len(left)}, the first {left[0]}); if clients don't share them, "
                f"pass parameters= or freeze them",
            )

    def _streams(self) -> bytes:
        return state_of_streams() + self._own.states()

    # -- gradients -------------------------------------------------------------------

    def _gradient(
        self,
        trainer: Trainer,
        module: LightningModule,
        x: Tensor,
        y: Tensor,
        prepare: Prepare | None,
        share: float,
        *,
        split: bool = True,
        weights: dict[str, Tensor] | None = None,
    ) -> _Gradients:
        """The criterion's mean gradient as training forms it; at other weights too."""
        inner = underlying(module)
        loss = SampleLoss(inner, self._criterion, prepare)
        modes = [(part, part.training) for part in loss.modules()]
        observed = observing(inner, self._criterion, plainly=False)
        with observed, as_evaluated(loss), loss.holding():
            for part, training in modes:
                part.training = training
            names, placed, fixed = {}, {}, {}
            for name, p in loss.named_parameters():
                names[name] = id(p)
                value = p if weights is None else weights[name]
                placed[name] = value.detach().clone().requires_grad_(p.requires_grad)
            for name, b in loss.named_buffers():
                fixed[name] = b.detach().clone()
            wanted = {k: p for k, p in placed.items() if p.requires_grad}
            before = self._streams()
            with torch.enable_grad(), trainer.precision_plugin.train_step_context():
                values = loss.batch(placed | fixed, x.detach().clone(), y.clone())
            if float(values.detach().mean()) < _CONFIDENT:
                return _Gradients({})

            def of(loss: Tensor, *, again: bool) -> dict[int, Tensor]:
                found = torch.autograd.grad(
                    loss,
                    list(wanted.values()),
                    retain_graph=again,
                    allow_unused=True,
                    materialize_grads=True,
                )
                # In torch 2.5 those of what takes no part are zeros with a graph.
                pairs = zip(wanted, found, strict=True)
                return {names[k]: g.detach() for k, g in pairs}

            counts: Counter[int] = Counter()
            if split and self._weights is not None and _classes(y):
                counts.update(y.tolist())
            self._every = _every(trainer, sum(p.numel() for p in wanted.values()))
            parts = {}
            for label in sorted(counts):
                own = of(share / len(y) * values[y == label].sum(), again=True)
                parts[label] = {
                    k: _some(g, self._every).clone() for k, g in own.items()
                }
            pieces = ((counts, parts),) if parts else ()
            mean = of(share * values.mean(), again=split)
            if not split:
                return _Gradients(mean)
            other = of(_MULTIPLE * share * values.mean(), again=False)
            apart = [
                (other[k] / _MULTIPLE - g).double().norm() for k, g in mean.items()
            ]
            rounding = float(torch.stack(apart).norm())
            streams = self._streams()
            at = {k: p.detach() for k, p in placed.items()}
            return _Gradients(
                mean, pieces, streams, rounding, None if streams == before else at
            )

    def _compare(
        self,
        trainer: Trainer,
        module: LightningModule,
        consumed: _Consumed | None,
        ours: list[_Gradients],
        drew: list[bool],
        last: tuple[Tensor, Tensor] | None,
    ) -> None:
        """Every process comes here at the same messages, and finds the same.

        What one can't do, all learn before any waits for it.
        """
        taken = {} if consumed is None else consumed.gradients
        here = bool(ours and last and taken and consumed and consumed.held)
        shapes = [tuple(g.shape) for g in taken.values()]
        mine = (here, self._failure, shapes, drew, [g.rounding for g in ours])
        told = gather(trainer, mine)
        failures = [why for _, why, *_ in told if why]
        if failures:
            raise _NotHereError(failures[0])
        if last is None or consumed is None or not all(ready for ready, *_ in told):
            return
        if any(other != shapes for _, _, other, *_ in told):
            raise _NotHereError("processes give optimisers different parameters")
        # Then gradients differ by nothing that was drawn.
        same = [all(alike) for alike in zip(*(d for *_, d, _ in told), strict=True)]
        off = [
            sum(each) / len(told) for each in zip(*(r for *_, r in told), strict=True)
        ]
        x, y = last

        def flat(gradient: dict[int, Tensor], every: int = 1) -> Tensor:
            return torch.cat([_some(gradient[k], every) for k in taken])

        def mean_of_all(mine: Tensor) -> Tensor:
            mean: Tensor = trainer.strategy.reduce(mine, reduce_op="mean")
            return mean

        theirs = mean_of_all(flat(taken)) / consumed.scale
        full = str(trainer.precision).startswith(("32", "64"))
        rounding = _ROUNDING if full else _ROUNDING_HALF
        found, lefts = [], []
        for gradient, prepare, alike, by in zip(
            ours, self._ways(), same, off, strict=True
        ):
            mean = mean_of_all(flat(gradient.mean))
            if not bool((torch.isfinite(theirs) & torch.isfinite(mean)).all()):
                return
            norm = max(float(mean.double().norm()), 1e-300)
            left = min(_LEFT * by / norm + _LEAST, rounding)
            lefts.append(left)
            one = verdict(theirs, mean, rounding, left, 0.0)
            if not alike and (not one.agrees or one.factor != 1):
                share = 1 / max(trainer.accumulate_grad_batches, 1)

                def apart(
                    way: Prepare | None = prepare,
                    share: float = share,
                    weights: dict[str, Tensor] | None = gradient.weights,
                ) -> Tensor:
                    draws = []
                    for seed in (1, 2):
                        with isolated_rng(seed), own_streams_kept(module) as own:
                            own.seed(seed)
                            drawn = self._gradient(
                                trainer,
                                module,
                                x,
                                y,
                                way,
                                share,
                                split=False,
                                weights=weights,
                            )
                            draws.append(flat(drawn.mean))
                    return draws[0] - draws[1]

                spread = mean_of_all(_everywhere(trainer, apart))
                one = verdict(theirs, mean, rounding, left, float(spread.norm()))
            found.append(one)
        best = min(found, key=lambda v: (not v.agrees, v.gap))
        if self._weights is None and best.agrees:
            self._count(best.factor, len(y))
            return
        if not best.agrees:
            size = f"{100 * best.gap:.2g}% of its size"
            self._unexplained = f"by {size}, beyond any factor"
        known = self._whole or self._messages > _COMPARED[-1]
        if self._weights is None and not known:
            if all(gather(trainer, _classes(y))):
                self._weights = [ClassWeights() for _ in ours]
                self._factors = []
                self._use(LossFactors())
                return
        elif self._weights is not None:
            pieces = [
                [
                    (counts, {label: flat(part).cpu() for label, part in parts.items()})
                    for counts, parts in gradient.pieces
                ]
                for gradient in ours
            ]
            everyone = gather(trainer, pieces)
            training = mean_of_all(flat(taken, self._every)) / consumed.scale
            if self._weighed(everyone, training, lefts):
                return
        self._say_unexplained()

    def _weighed(
        self, everyone: Sequence[Any], training: Tensor, left: Sequence[float]
    ) -> bool:
        """Whether weights of classes explain a message, or the next one may tell.

        Args:
            everyone: of each process, for each way, the pieces of its batches.
            training: the same entries of training's gradient.
            left: for each way, the share of its norm that they may leave.
        """
        weights, count = self._weights or [], len(everyone)
        if all(pieces for ways in everyone for pieces in ways):
            for i, one in enumerate(weights):
                pieces = [
                    Piece(
                        counts, {k: part.to(training) / count for k, part in of.items()}
                    )
                    for ways in everyone
                    for counts, of in ways[i]
                ]
                if one.add(training, pieces, left[i]):
                    self._found_weights(one)
                    return True
        return self._messages <= _COMPARED[-1] and any(w.possible for w in weights)

    def _found_weights(self, found: ClassWeights) -> None:
        alone = found.how != "average"  # else a single sample's weight cancels
        self._use(LossFactors(1.0, found.weights if alone else {}))
        if self._messages > _COMPARED[-1]:
            self._tell_weights()

    def _tell_weights(self) -> None:
        found = next((w for w in self._weights or () if w.how), None)
        if found is None or found.equal:
            return  # equal ones don't explain what no factor did
        self._left, self._unexplained = False, ""
        if found.how == "average":
            self._tell(
                "factor",
                f"training weighs the losses of classes ({found.words()}) and divides "
                f"by the weights of a batch; scores are about a sample alone, whose "
                f"gradient has no weight then, and in a batch a sample counts as its "
                f"weight says",
            )
            return
        missing = sorted(self._classes - found.weights.keys())
        more = f"; not met, and taken for 1: {missing}" if missing else ""
        self._tell(
            "factor",
            f"training weighs the losses of classes ({found.words()}{more}); scores "
            f"after step {self._used_at} are of the weighted gradient, those before of "
            f"the criterion's",
        )

    def _say_unexplained(self) -> None:
        if not self._unexplained:
            return
        if any(weights.possible for weights in self._weights or ()):
            self._unexplained += (
                "; weights of classes may explain it, which its batches don't tell"
            )
        elif self._weights:
            self._unexplained += " of all samples or of a class"
        self._differs(self._unexplained)

    def _use(self, factors: LossFactors) -> None:
        """Scores are of the gradient with these factors from now on."""
        if factors != self._used:
            if not self._used:
                self._used_at = self._step
            self._used = factors
            self._weigh(factors)

    def _count(self, factor: float, samples: int) -> None:
        """Two losses can agree up to a factor at first, and not later."""
        if factor == 1 and not self._factors:
            return
        self._factors.append((factor, samples))
        first, before = self._factors[0]
        fixed = math.isclose(first, factor, rel_tol=SAME)
        if not fixed and not math.isclose(
            first / before, factor / samples, rel_tol=SAME
        ):
            self._differs(f"by a factor that changes ({first:.3g}, {factor:.3g})")
            return
        self._use(LossFactors(self._alone(factor, samples)))
        if self._messages > _COMPARED[-1]:
            self._tell_factor(factor, samples)

    def _alone(self, factor: float, samples: int) -> float:
        """The factor of a batch of one."""
        if self._whole:
            return factor
        first, before = self._factors[0]
        adds = samples > 1 and math.isclose(factor, samples, rel_tol=SAME)
        adds |= any(
            size != before and not math.isclose(first, one, rel_tol=SAME)
            for one, size in self._factors
        )
        if not adds:
            return factor
        alone = factor / samples
        return 1.0 if math.isclose(alone, 1, rel_tol=SAME) else alone

    def _tell_factor(self, factor: float, samples: int) -> None:
        alone = self._alone(factor, samples)
        self._left = False
        if alone == 1:
            self._tell(
                "factor",
                "training adds the losses of a batch up instead of averaging them; "
                "scores are about a sample alone, where that is the same",
            )
            return
        self._tell(
            "factor",
            f"the gradient of training is {alone:.3g} times that of the criterion; "
            f"scores after step {self._used_at} are of the former, those before of the "
            f"latter: pass criterion= with that factor for all",
        )

    def _differs(self, how: str) -> None:
        self._left, self._unexplained = False, ""
        self._use(LossFactors())
        if self._whole:
            self._tell(
                "gradient",
                f"the gradient that training uses is not that of its training step's "
                f"loss (it differs {how}), so scores are not about what training "
                f"shares",
            )
            return
        self._tell(
            "gradient",
            f"the gradient that training uses is not that of the criterion on the same "
            f"batch (it differs {how}), so scores are not about what training shares: "
            f"a few per cent can be decibels; pass criterion=, a function "
            f"(module, x, y) that returns the loss of each sample, or "
            f"criterion='training_step'; or prepare=, for what the training step does "
            f"to a batch of inputs",
        )

    def _give_up(self, why: str) -> None:
        self._left, self._ours = False, []
        self._tell(
            "gradient",
            f"whether training uses the loss that is scored could not be found out: "
            f"{why}",
        )
