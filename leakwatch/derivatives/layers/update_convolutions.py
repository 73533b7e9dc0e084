"""Convolutions with kernels of their own for each attack."""

from __future__ import annotations

from typing import Any, TypeAlias, cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leakwatch.derivatives.layers.convolutions import Convolution
from leakwatch.derivatives.layers.update_products import Operator

__all__ = ["convolution"]

_Sizes: TypeAlias = tuple[int, int]

# Channels with which the library's convolutions work well.
_REGISTER = 8
# Numbers side by side that are worth copying at once.
_RUN = 16
# Numbers of which a core's cache holds several times as many.
_CACHED = 2**17


def convolution(module: nn.Conv2d) -> Operator:
    """The products of a convolution, in the way that suits its sizes.

    Args:
        module: with zero padding of a fixed size.
    """
    if module.groups > 1:
        return _Convolution(module)
    if module.in_channels >= _REGISTER:
        return _Fitting(module)
    # A patch is copied in runs of this length when its channels lie together.
    run = module.in_channels * module.kernel_size[1]
    return (_Columns if run < _RUN else _Patches)(module)


class _Sliding(Operator):
    """What both ways to convolve have in common."""

    def __init__(self, module: nn.Conv2d) -> None:
        self._shape = module.weight.shape
        self._stride = cast(_Sizes, module.stride)
        self._padding = cast(_Sizes, module.padding)
        self._dilation = cast(_Sizes, module.dilation)
        self._groups = module.groups

    def along(
        self, w: Tensor, b: Tensor | None, rows: Tensor, like: Tensor, delta: Tensor
    ) -> Tensor:
        """See :class:`Operator`."""
        # Weights are smaller than what they give.
        weight, bias = self.gradient(rows, delta, len(w), b is not None)
        found: Tensor = torch.linalg.vecdot(weight, w.flatten(1))
        if b is not None and bias is not None:
            found = found + torch.linalg.vecdot(bias, b)
        return found

    def _scattered(self, w: Tensor, delta: Tensor, like: Tensor) -> Tensor:
        """The adjoint for few channels, added up in runs as long as a row of places."""
        (sh, sw), (ph, pw), (eh, ew) = self._stride, self._padding, self._dilation
        d = self._by_attack(delta, len(w))
        columns = torch.bmm(w.flatten(2).transpose(1, 2), d.transpose(1, 2))
        sizes = self._sizes(like, len(w))
        columns = columns.view(sizes).transpose(1, 4)
        n, channels, height, width = like.shape
        image = d.new_zeros(
            len(w), n // len(w), channels, height + 2 * ph, width + 2 * pw
        )
        down, across = sizes[5:]
        for i in range(sizes[2]):
            for j in range(sizes[3]):
                part = image[..., i * eh :, j * ew :]
                part = part[
                    ..., : (down - 1) * sh + 1 : sh, : (across - 1) * sw + 1 : sw
                ]
                part.add_(columns[:, :, i, j])
        found = image[..., ph : ph + height, pw : pw + width].reshape(like.shape)
        if like.is_contiguous():
            return found
        return found.contiguous(memory_format=torch.channels_last)

    def _sizes(self, a: Tensor, attacks: int) -> torch.Size:
        """Attacks, channels, kernel rows and columns, samples, rows and columns."""
        places = (self._size(a, i) for i in (0, 1))
        return torch.Size((attacks, *self._shape[1:], len(a) // attacks, *places))

    def _by_attack(self, delta: Tensor, attacks: int) -> Tensor:
        return delta.permute(0, 2, 3, 1).reshape(attacks, -1, delta.shape[1])

    def _size(self, a: Tensor, i: int) -> int:
        window = self._dilation[i] * (self._shape[2 + i] - 1) + 1
        return (a.shape[2 + i] + 2 * self._padding[i] - window) // self._stride[i] + 1


@final
class _Convolution(_Sliding):
    """One call of the library for each attack: its samples fill it well enough."""

    def arranged(self, w: Tensor) -> Tensor:
        # The format of the images, which each call would copy them to.
        return w.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)

    def apply(self, w: Tensor, b: Tensor | None, rows: Tensor, like: Tensor) -> Tensor:
        return _joined(
            [
                F.conv2d(
                    part,
                    w[i],
                    None if b is None else b[i],
                    self._stride,
                    self._padding,
                    self._dilation,
                    self._groups,
                )
                for i, part in enumerate(rows.chunk(len(w)))
            ]
        )

    def adjoint(self, w: Tensor, delta: Tensor, like: Tensor) -> Tensor:
        pairs = zip(delta.chunk(len(w)), like.chunk(len(w)), strict=True)
        mask = (True, False, False)
        return _joined(
            [self._backward(d, a, w[i], mask)[0] for i, (d, a) in enumerate(pairs)]
        )

    def gradient(
        self, rows: Tensor, delta: Tensor, attacks: int, biased: bool
    ) -> tuple[Tensor, Tensor | None]:
        pairs = zip(delta.chunk(attacks), rows.chunk(attacks), strict=True)
        # Of the weight only the shape and memory format are looked at.
        w = rows.new_empty(self._shape).to(memory_format=torch.channels_last)
        mask = (False, True, False)
        parts = [self._backward(d, a, w, mask)[1] for d, a in pairs]
        weight = torch.stack([p.reshape(-1) for p in parts])
        return weight, self._by_attack(delta, attacks).sum(1) if biased else None

    def _backward(
        self, delta: Tensor, a: Tensor, w: Tensor, mask: tuple[bool, bool, bool]
    ) -> Any:
        return torch.ops.aten.convolution_backward(
            delta,
            a,
            w,
            None,
            self._stride,
            self._padding,
            self._dilation,
            False,
            (0, 0),
            self._groups,
            mask,
        )


@final
class _Patches(_Sliding):
    """Products of unfolded patches, for few input channels.

    The library's kernels want channels that fill a vector register, and are many times
    slower than these otherwise.
    """

    def __init__(self, module: nn.Conv2d) -> None:
        super().__init__(module)
        self._kernel = Convolution(True, True, module)

    def rows(self, a: Tensor, attacks: int) -> Tensor:
        return self._kernel.patches(a)

    def apply(self, w: Tensor, b: Tensor | None, rows: Tensor, like: Tensor) -> Tensor:
        a = rows.view(len(w), -1, rows.shape[2])
        turned = self._flat(w).transpose(1, 2)
        if b is None:
            out = torch.bmm(a, turned)
        else:
            out = torch.baddbmm(b[:, None], a, turned)
        height, width = (self._size(like, i) for i in (0, 1))
        return out.view(len(rows), height, width, -1).permute(0, 3, 1, 2)

    def adjoint(self, w: Tensor, delta: Tensor, like: Tensor) -> Tensor:
        if self._shape[1] < _REGISTER:
            return self._scattered(w, delta, like)
        columns = torch.bmm(self._by_attack(delta, len(w)), self._flat(w))
        return self._kernel.fold(columns, like, delta)

    def gradient(
        self, rows: Tensor, delta: Tensor, attacks: int, biased: bool
    ) -> tuple[Tensor, Tensor | None]:
        a = rows.view(attacks, -1, rows.shape[2])
        d = self._by_attack(delta, attacks)
        weight = self._kernel.restore(torch.bmm(d.transpose(1, 2), a).flatten(1))
        return weight, d.sum(1) if biased else None

    def _flat(self, w: Tensor) -> Tensor:
        """Kernels in the order of patches, whose channels come last."""
        return w.permute(0, 1, 3, 4, 2).flatten(2)


@final
class _Columns(_Sliding):
    """Products of patches with places side by side, for one or a few channels.

    They are copied, and added back, in runs as long as a row of the output, where
    those of a patch have only a few numbers. A last row of ones is for the biases.
    """

    def rows(self, a: Tensor, attacks: int) -> Tensor:
        (sh, sw), (ph, pw), (eh, ew) = self._stride, self._padding, self._dilation
        image = F.pad(a.contiguous(), (pw, pw, ph, ph))
        image = image.view(attacks, -1, *image.shape[1:])
        by_attack, by_n, by_channel, by_row, by_column = image.stride()
        sizes = self._sizes(a, attacks)
        windows = image.as_strided(
            sizes,
            (
                by_attack,
                by_channel,
                by_row * eh,
                by_column * ew,
                by_n,
                by_row * sh,
                by_column * sw,
            ),
        )
        numbers = self._shape[1:].numel()
        rows = a.new_empty(attacks, numbers + 1, sizes[4:].numel())
        rows[:, numbers] = 1.0
        # A view, whatever lies between the attacks.
        inner = rows[:, :numbers].as_strided(sizes, _strides(rows.stride(0), sizes))
        inner.copy_(windows)
        return rows

    def apply(self, w: Tensor, b: Tensor | None, rows: Tensor, like: Tensor) -> Tensor:
        kernel = w.flatten(2)
        if b is None:
            rows = rows[:, :-1]
        else:
            kernel = torch.cat([kernel, b[:, :, None]], 2)
        out = torch.bmm(rows.transpose(1, 2), kernel.transpose(1, 2))
        height, width = (self._size(like, i) for i in (0, 1))
        return out.view(len(like), height, width, -1).permute(0, 3, 1, 2)

    def adjoint(self, w: Tensor, delta: Tensor, like: Tensor) -> Tensor:
        return self._scattered(w, delta, like)

    def gradient(
        self, rows: Tensor, delta: Tensor, attacks: int, biased: bool
    ) -> tuple[Tensor, Tensor | None]:
        found = torch.bmm(rows, self._by_attack(delta, attacks))
        weight = found[:, :-1].transpose(1, 2).flatten(1)
        return weight, found[:, -1] if biased else None


@final
class _Fitting(_Sliding):
    """Patches where those of an attack stay in the cache, the library beyond that.

    A call of the library for a sample or two is mostly preparation.
    """

    def __init__(self, module: nn.Conv2d) -> None:
        super().__init__(module)
        self._few, self._many = _Patches(module), _Convolution(module)

    def rows(self, a: Tensor, attacks: int) -> Tensor:
        return self._for(a, attacks).rows(a, attacks)

    def apply(self, w: Tensor, b: Tensor | None, rows: Tensor, like: Tensor) -> Tensor:
        return self._for(like, len(w)).apply(w, b, rows, like)

    def adjoint(self, w: Tensor, delta: Tensor, like: Tensor) -> Tensor:
        return self._for(like, len(w)).adjoint(w, delta, like)

    def gradient(
        self, rows: Tensor, delta: Tensor, attacks: int, biased: bool
    ) -> tuple[Tensor, Tensor | None]:
        few = rows.ndim == 3
        chosen = self._few if few else self._many
        return chosen.gradient(rows, delta, attacks, biased)

    def arranged(self, w: Tensor) -> Tensor:
        return self._many.arranged(w)

    def _for(self, a: Tensor, attacks: int) -> _Patches | _Convolution:
        places = self._size(a, 0) * self._size(a, 1) * (len(a) // attacks)
        numbers = places * self._shape[1:].numel()
        return self._few if numbers <= _CACHED else self._many


def _strides(first: int, sizes: torch.Size) -> tuple[int, ...]:
    """Of rows that lie densely, apart from the first dimension."""
    return first, *(sizes[i + 1 :].numel() for i in range(1, len(sizes)))


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
