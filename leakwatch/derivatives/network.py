"""A network whose shared gradients can be differentiated in its input."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, Self

import torch
from torch import Tensor, nn

from leakwatch.checks import check_criterion, check_inputs
from leakwatch.derivatives.autodiff import LossFunction, Product, pulled, pushed
from leakwatch.derivatives.losses import classification_criterion
from leakwatch.derivatives.parameter_filters import ParameterFilter, matching
from leakwatch.derivatives.runtime import (
    Criterion,
    Prepare,
    SampleLoss,
    Weights,
    as_evaluated,
    check_module,
    evaluating,
    underlying,
)
from leakwatch.derivatives.verification import (
    Examination,
    Path,
    examine,
    known,
    remember,
)
from leakwatch.status import OK, Status

__all__ = ["DifferentiableNetwork"]

_log = logging.getLogger(__name__)


class DifferentiableNetwork:
    """What is evaluated and shared, in which arithmetic, differentiated by which path.

    What :class:`leakwatch.derivatives.GradientMap` takes its products of; its arguments
    and attributes are described there.
    """

    def __init__(
        self,
        module: nn.Module,
        criterion: Criterion | None = None,
        *,
        prepare: Prepare | None = None,
        parameters: ParameterFilter | None = None,
        dtype: torch.dtype = torch.float32,
        path: Path = "auto",
        chunk_size: int | None = None,
    ) -> None:
        if dtype not in (torch.float32, torch.float64):
            lower = "second derivatives in lower precision carry no usable digits"
            why = "" if isinstance(dtype, str) else f": {lower}"
            raise ValueError(
                f"dtype must be torch.float32 or torch.float64, got {dtype!r}{why}."
            )
        check_criterion(criterion)
        if path not in ("auto", "vmap", "loop"):
            raise ValueError(f"path must be 'auto', 'vmap' or 'loop', got {path!r}.")
        given: object = chunk_size
        if given is not None and not (isinstance(given, int) and given >= 1):
            raise ValueError(
                f"chunk_size must be None or an integer of at least 1, got "
                f"{chunk_size!r}."
            )
        module = underlying(module)
        check_module(module)
        self.module = module
        self.criterion = classification_criterion if criterion is None else criterion
        self.dtype = dtype
        self.chunk_size = chunk_size
        self.formed: set[str] = set()
        self.facts: dict[object, int] = {}
        self.together = True
        self.unrecorded = ""
        self.prepare = prepare
        self._loss = SampleLoss(module, self.criterion, prepare)
        if parameters is not None:
            with as_evaluated(self._loss):
                # A tied tensor goes by each of its names, and counts under the first.
                first = {id(p): name for name, p in self._loss.named_parameters()}
                every = dict(self._loss.named_parameters(remove_duplicate=False))
            by_name = {name.removeprefix("module."): p for name, p in every.items()}
            chosen = matching(by_name, parameters)
            self._loss.only = frozenset(first[id(by_name[name])] for name in chosen)
        self._path = path
        self._resolved: Literal["vmap", "loop"] | None = None
        self._push: Product = pushed
        self._pull: Product = pulled
        self._notes: dict[str, None] = {}
        self._doubt = OK
        self._sharp = False
        self._others: dict[torch.dtype, Self] = {}

    @property
    def path(self) -> Path:
        """``"vmap"`` or ``"loop"`` once known, ``"auto"`` before the first product."""
        return self._resolved or self._path

    @property
    def notes(self) -> tuple[str, ...]:
        """What the first product found out that a reader of results should know."""
        return tuple(self._notes)

    @property
    def doubt(self) -> Status:
        """What the first product found results to be worth at most."""
        return self._doubt

    @property
    def sharp(self) -> bool:
        """Whether derivatives of any sample can be expected to bear a difference."""
        return self._sharp and self._doubt == OK

    @property
    def size(self) -> int:
        """d_θ, the number of shared gradient entries."""
        return sum(self.sizes().values())

    def sizes(self) -> dict[str, int]:
        """How many entries each shared parameter has, by name, in their order in g."""
        with as_evaluated(self._loss):
            return {
                name.removeprefix("module."): p.numel()
                for name, p in self._loss.named_parameters()
                if self._loss.shares(name, p)
            }

    def in_dtype(self, dtype: torch.dtype) -> Self:
        """The same map in other arithmetic, without a second examination.

        Args:
            dtype: float32 or float64.

        Returns:
            The map itself, or one on the same path once that is known.
        """
        if dtype == self.dtype:
            return self
        other = self._others.get(dtype)
        if other is None:
            other = type(self)(
                self.module,
                self.criterion,
                prepare=self.prepare,
                dtype=dtype,
                path=self.path,
                chunk_size=self.chunk_size,
            )
            other._loss.only, other.formed = self._loss.only, self.formed
            self._others[dtype] = other
        if self._resolved is not None:
            other._resolved = self._resolved
            other._push, other._pull = self._push, self._pull
            other._doubt, other._sharp = self._doubt, self._sharp
            other._loss.caches.slots = self._loss.caches.slots
        return other

    def with_criterion(
        self, criterion: Criterion, dtype: torch.dtype | None = None
    ) -> Self:
        """The same module and shared parameters under another loss.

        Args:
            criterion: see the class.
            dtype: arithmetic. Default: this map's.

        Returns:
            A new map, which is examined at its first product.
        """
        other = type(self)(
            self.module,
            criterion,
            prepare=self.prepare,
            dtype=self.dtype if dtype is None else dtype,
            path=self._path,
            chunk_size=self.chunk_size,
        )
        other._loss = self.loss_under(criterion)
        return other

    def loss_under(self, criterion: Criterion) -> SampleLoss:
        """The loss of the same module and shared parameters under a criterion.

        Args:
            criterion: see the class.

        Returns:
            A loss that shares what this map shares, with the caches found so far.
        """
        loss = SampleLoss(self.module, criterion, self.prepare)
        if self._loss.only is not None:
            # By what they are: a criterion's parameters have other names in another.
            with as_evaluated(self._loss), as_evaluated(loss):
                own = dict(self._loss.named_parameters())
                kept = {id(own[name]) for name in self._loss.only}
                names = [name for name, p in loss.named_parameters() if id(p) in kept]
            loss.only = frozenset(names)
        loss.caches.slots = self._loss.caches.slots
        return loss

    @property
    def sample_loss(self) -> LossFunction:
        """The loss of one sample, a differentiable function of weights and input."""
        return self._loss.sample

    def batch_loss(
        self,
        shared: dict[str, Tensor],
        fixed: dict[str, Tensor],
        x: Tensor,
        y: Tensor,
        weight: Tensor,
    ) -> Tensor:
        """The sum of the losses of a batch that is evaluated in one piece.

        Args:
            shared: parameters that require gradients, by name.
            fixed: all other parameters and buffers.
            x: network inputs.
            y: labels.
            weight: factor on each loss.

        Returns:
            A scalar. What it does for a sample is what :attr:`sample_loss` does only
            if the network keeps its samples apart.
        """
        buffers = {name for name, _ in self._loss.named_buffers()}
        # As for one sample: a forward may write into its input and buffers.
        own = {k: t.clone() if k in buffers else t for k, t in fixed.items()}
        return self._loss.batch(shared | own, x.clone(), y.clone()) @ weight

    def stamp(self) -> tuple[tuple[int, int], ...]:
        """Tells the weights and buffers of now from later ones.

        Seen are writes in place and tensors that take the place of others; not seen
        are writes through ``.data``, which torch does not count, or into what was made
        under ``torch.inference_mode``.
        """
        own = (*self._loss.parameters(), *self._loss.buffers())
        return tuple((t.data_ptr(), 0 if t.is_inference() else t._version) for t in own)

    @contextmanager
    def evaluation(self, x: Tensor) -> Iterator[Weights]:
        """The conditions under which every evaluation runs; all undone afterwards.

        Args:
            x: the inputs, for their device and type.

        Yields:
            The weights at this moment, in ``dtype``.

        Raises:
            ValueError: if ``x`` is not floating point.
        """
        check_inputs(x)
        with evaluating(self._loss, x.device.type, self.dtype) as at:
            yield at

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Submodules under the names that their weights have in :class:`Weights`."""
        yield from self._loss.named_modules()

    def prepared(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and labels, detached, in ``dtype`` and on one device."""
        # Clones made out of inference mode can be saved for a backward pass.
        x = x.detach().to(self.dtype)
        y = y.detach().to(x.device)
        if y.is_floating_point():
            y = y.to(self.dtype)
        return (
            x.clone() if x.is_inference() or _shares_memory(x) else x,
            y.clone() if y.is_inference() else y,
        )

    def resolve(self, at: Weights, x: Tensor, y: Tensor) -> Literal["vmap", "loop"]:
        """The path for this module, found at the first call and kept.

        Args:
            at: the weights of the evaluation in progress.
            x: network inputs, in ``dtype``.
            y: labels.

        Returns:
            ``"vmap"`` or ``"loop"``.

        Raises:
            UnsupportedModuleError: if neither gives derivatives that can be trusted.
        """
        if self._resolved is not None:
            return self._resolved
        examination = known(self._loss, x, y, self._path)
        if examination is None:
            examination = examine(self._loss, at, x, y, self._path)
            remember(self._loss, x, y, self._path, examination)
        return self._adopt(examination)

    def recall(self, x: Tensor, y: Tensor) -> bool:
        """Whether the network was examined before, and is now as it was then.

        Args:
            x: network inputs, in ``dtype``; inside an evaluation.
            y: labels.
        """
        examination = known(self._loss, x, y, self._path)
        if examination is not None and self._resolved is None:
            self._adopt(examination)
        return examination is not None

    def _adopt(self, examination: Examination) -> Literal["vmap", "loop"]:
        self._push, self._pull = examination.push, examination.pull
        self._doubt, self._sharp = examination.doubt, examination.sharp
        self.facts = examination.facts
        name = type(self.module).__name__
        if examination.conclusive:
            self._resolved = examination.path
            if examination.why:
                _log.warning(
                    "leakwatch evaluates %s sample by sample, which is slower: %s.",
                    name,
                    examination.why,
                )
        for note in examination.notes:
            self.note(note)
        return examination.path

    def note(self, text: str) -> None:
        """Adds to ``notes`` and says it in the log, once."""
        if text not in self._notes:
            self._notes[text] = None
            _log.warning("leakwatch on %s: %s.", type(self.module).__name__, text)

    @property
    def forward_mode(self) -> bool:
        """Whether J v is the tangent of g on the ``"vmap"`` path."""
        return self._push is pushed


def _shares_memory(x: Tensor) -> bool:
    """Whether samples are a part of a larger tensor, such as a whole data set.

    A tangent in forward mode gets as much memory as there is behind its tensor.
    """
    if x.layout != torch.strided:
        return False
    return x.untyped_storage().nbytes() > x.numel() * x.itemsize
