"""The products of convolutions: by patches or by the library, whichever is faster."""

from __future__ import annotations

from typing import Any, TypeAlias, cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from leakwatch.derivatives.layers.products import (
    LayerInNetwork,
    LayerProducts,
    Layout,
    MatrixProducts,
    Rule,
    register,
)
from leakwatch.derivatives.runtime.modules import NotLayerwiseError
from leakwatch.derivatives.safe_ops.convolution import ConstantConvolution

__all__ = ["Patches", "fits_registers"]

_Sizes: TypeAlias = tuple[int, int]

# Channels with which the library's convolutions work well.
_REGISTER = 8
# Numbers of which a core's cache holds several times as many.
_CACHED = 2**17


def fits_registers(module: nn.Conv2d) -> bool:
    """Whether the library's grouped kernels are faster than patches.

    They hold 8 numbers; with other channel counts, or strides, they are several times
    slower. With many channels the products of patches outweigh copying them.
    """
    fits = module.in_channels % _REGISTER == module.out_channels % _REGISTER == 0
    return fits and module.stride == (1, 1) and module.out_channels < 64


def _convolution(layer: LayerInNetwork) -> Rule | None:
    module = layer.module
    if not isinstance(module, nn.Conv2d) or isinstance(module.padding, str):
        return None
    if module.padding_mode != "zeros":
        return None
    weight = layer.tensors["weight"]
    if layer.layout == "channels_last":
        weight = weight.contiguous(memory_format=torch.channels_last)
    forward = ConstantConvolution(
        weight,
        layer.tensors.get("bias"),
        cast(_Sizes, module.stride),
        cast(_Sizes, module.padding),
        cast(_Sizes, module.dilation),
        module.groups,
    )

    def checked(a: Tensor) -> Tensor:
        if a.ndim != 4:
            raise NotLayerwiseError("a convolution met an input without a batch")
        return forward(a)

    return Rule(_products(module, layer.layout), checked, weight=weight)


def _products(module: nn.Conv2d, layout: Layout | None) -> LayerProducts:
    if layout is None:
        if module.groups > 1:
            return _ByRow(module)
        few = module.in_channels < _REGISTER
        return _FewChannels(module) if few else _Fitting(module)
    grouped = module.groups > 1 or (layout == "contiguous" and fits_registers(module))
    return _Grouped(module) if grouped else Patches(module)


class _Sliding:
    """The geometry of a convolution."""

    def __init__(self, module: nn.Conv2d) -> None:
        self.shape = module.weight.shape
        self.stride = cast(_Sizes, module.stride)
        self.padding = cast(_Sizes, module.padding)
        self.dilation = cast(_Sizes, module.dilation)
        self.groups = module.groups

    def places(self, a: Tensor) -> list[int]:
        """Rows and columns of the output for this input."""
        return [
            (size + 2 * pad - d * (kernel - 1) - 1) // step + 1
            for size, pad, d, kernel, step in zip(
                a.shape[2:],
                self.padding,
                self.dilation,
                self.shape[2:],
                self.stride,
                strict=True,
            )
        ]

    def convolved(self, a: Tensor, w: Tensor, groups: int) -> Tensor:
        """The library's convolution."""
        how = self.stride, self.padding, self.dilation, groups
        return F.conv2d(a, w, None, *how)

    def transposed(self, d: Tensor, a: Tensor, w: Tensor, groups: int) -> Tensor:
        """Wᵀδ by the library."""
        return cast(Tensor, self._backward(d, a, w, groups, (True, False, False))[0])

    def correlated(self, d: Tensor, a: Tensor, w: Tensor, groups: int) -> Tensor:
        """Σ δ aᵀ by the library, which reads the shape and memory format of w."""
        return cast(Tensor, self._backward(d, a, w, groups, (False, True, False))[1])

    def _backward(
        self,
        d: Tensor,
        a: Tensor,
        w: Tensor,
        groups: int,
        mask: tuple[bool, bool, bool],
    ) -> Any:
        how = self.stride, self.padding, self.dilation, False, (0, 0), groups
        return torch.ops.aten.convolution_backward(d, a, w, None, *how, mask)


class _ChannelsLast(_Sliding, LayerProducts):
    """Rows of a kernel lie side by side in memory, with the channels last."""

    def arrange(self, weight: Tensor) -> Tensor:
        """See :class:`LayerProducts`."""
        return weight.reshape(-1, *self.shape).permute(0, 1, 3, 4, 2).flatten(1)

    def restore(self, weight: Tensor) -> Tensor:
        """See :class:`LayerProducts`."""
        rows, channels, height, width = self.shape
        ordered = weight.reshape(-1, rows, height, width, channels)
        return ordered.permute(0, 1, 4, 2, 3).flatten(1)


class Patches(_ChannelsLast, MatrixProducts):
    """A convolution as matrix products of unfolded patches, channels last.

    Patches are copied, and added back, in long runs. For ungrouped convolutions.
    """

    def inputs(self, a: Tensor, rows: int) -> Tensor:
        """What the kernel sees at each place, ``(rows, T, numbers of a patch)``."""
        size = self.shape[2], self.shape[3]
        patches = _unfolded(a, size, self.stride, self.padding, self.dilation)
        return patches.view(rows, -1, patches.shape[2])

    def backprops(self, delta: Tensor, rows: int) -> Tensor:
        """See :class:`LayerProducts`."""
        return delta.permute(0, 2, 3, 1).reshape(rows, -1, delta.shape[1])

    def output_adjoint(
        self, w: Tensor, b: Tensor | None, a: Tensor, like: Tensor
    ) -> Tensor:
        """See :class:`LayerProducts`."""
        out = self.outputs(w, b, a).view(len(like), *self.places(like), -1)
        return out.permute(0, 3, 1, 2)

    def input_adjoint(self, w: Tensor, d: Tensor, like: Tensor) -> Tensor:
        """See :class:`LayerProducts`."""
        rows, channels, kh, kw = self.shape
        ph, pw = kh - 1 - self.padding[0], kw - 1 - self.padding[1]
        plain = self.stride == (1, 1) == self.dilation and min(ph, pw) >= 0
        w = w.reshape(len(d), rows, -1)
        # Numbers that are moved, over kh · kw: patches of δ and the kernel, against
        # patches of the input, twice.
        positions = d.shape[1]
        if not plain or rows * (positions + 3 * channels) > 2 * positions * channels:
            return self._folded(torch.bmm(d, w), like)
        # A convolution of δ with the kernel turned around.
        delta = d.view(len(like), *self.places(like), -1).permute(0, 3, 1, 2)
        columns = _unfolded(delta, (kh, kw), (1, 1), (ph, pw), (1, 1))
        turned = w.view(-1, rows, kh, kw, channels).flip(2, 3)
        turned = turned.permute(0, 2, 3, 1, 4).reshape(len(w), -1, channels)
        image = torch.bmm(columns.view(len(w), -1, turned.shape[1]), turned)
        n, _, height, width = like.shape
        image = image.view(n, height, width, channels).permute(0, 3, 1, 2)
        return _in_format_of(image, like)

    def both_adjoints(
        self, u: Tensor | None, d: Tensor, w: Tensor, back: Tensor, like: Tensor
    ) -> Tensor:
        """Uᵀδ + Wᵀz̄: all that the input receives when nothing else follows it.

        Args:
            u: cotangent of each row's weight gradient, ``None`` for none.
            d: from :meth:`backprops`.
            w: W that all rows share, ``(out, in, height, width)``.
            back: z̄, what the output received.
            like: the layer's input.
        """
        kernel = w.permute(0, 2, 3, 1).flatten(1)
        z = back.permute(0, 2, 3, 1).reshape(-1, len(kernel))
        total = torch.mm(z, kernel).view(len(d), d.shape[1], -1)
        if u is not None:
            total.baddbmm_(d, u.reshape(len(d), d.shape[2], -1))
        return self._folded(total, like)

    def _folded(self, columns: Tensor, like: Tensor) -> Tensor:
        """Patches added up to an image, the adjoint of unfolding."""
        (kh, kw), (sh, sw) = self.shape[2:], self.stride
        (ph, pw), (eh, ew) = self.padding, self.dilation
        n, channels, height, width = like.shape
        down, across = self.places(like)
        # Every ``apart``-th patch of a row overlaps none of the others, so that a
        # whole row of each, kw · channels numbers, is added at once.
        apart = -(-kw // sw) if ew == 1 else 1
        wide = max(width + 2 * pw, (across - 1) * sw + ew * (kw - 1) + 1)
        image = columns.new_zeros(n, height + 2 * ph + sh, wide + apart * sw, channels)
        patches = columns.view(n, down, across, kh, kw, channels)
        by_n, by_row, by_column, _ = image.stride()
        for i in range(kh):
            if ew != 1:
                for j in range(kw):
                    image.as_strided(
                        (n, down, across, channels),
                        (by_n, by_row * sh, by_column * sw, 1),
                        i * eh * by_row + j * ew * by_column,
                    ).add_(patches[:, :, :, i, j])
                continue
            for r in range(min(apart, across)):
                some = patches[:, :, r::apart, i].flatten(3)
                image.as_strided(
                    some.shape,
                    (by_n, by_row * sh, by_column * sw * apart, 1),
                    i * eh * by_row + r * by_column * sw,
                ).add_(some)
        inner = image[:, ph : ph + height, pw : pw + width]
        return _in_format_of(inner.permute(0, 3, 1, 2), like)


@final
class _FewChannels(Patches):
    """Patches with an adjoint for one or a few input channels.

    Patches of these have short runs of numbers. They are added up in runs as long as a
    row of places instead.
    """

    def input_adjoint(self, w: Tensor, d: Tensor, like: Tensor) -> Tensor:
        """See :class:`LayerProducts`."""
        rows, channels, kh, kw = self.shape
        (sh, sw), (ph, pw), (eh, ew) = self.stride, self.padding, self.dilation
        down, across = self.places(like)
        n, _, height, width = like.shape
        columns = torch.bmm(w.reshape(len(d), rows, -1).mT, d.mT)
        columns = columns.view(len(d), kh, kw, channels, -1, down, across)
        image = d.new_zeros(
            len(d), n // len(d), channels, height + 2 * ph, width + 2 * pw
        )
        for i in range(kh):
            for j in range(kw):
                part = image[..., i * eh :, j * ew :]
                part = part[
                    ..., : (down - 1) * sh + 1 : sh, : (across - 1) * sw + 1 : sw
                ]
                part.add_(columns[:, i, j].transpose(1, 2))
        inner = image[..., ph : ph + height, pw : pw + width].reshape(like.shape)
        if like.is_contiguous():
            return inner
        return inner.contiguous(memory_format=torch.channels_last)


@final
class _Grouped(_Sliding, LayerProducts):
    """A convolution with all samples side by side as groups of one large one.

    The library's own kernels do the work; faster than patches for large images and
    channels that fill vector registers. Also for grouped convolutions.
    """

    def inputs(self, a: Tensor, rows: int) -> Tensor:
        """See :class:`LayerProducts`."""
        return a.contiguous().view(rows, -1, *a.shape[1:])

    def backprops(self, delta: Tensor, rows: int) -> Tensor:
        """See :class:`LayerProducts`."""
        return self.inputs(delta, rows)

    def weight_grad(self, a: Tensor, d: Tensor) -> Tensor:
        """See :class:`LayerProducts`."""
        n = a.shape[0] * a.shape[1]
        weight = a.new_empty(()).expand(n * self.shape[0], *self.shape[1:])
        grads = self.correlated(_beside(d), _beside(a), weight, n * self.groups)
        by_sample = grads.view(*a.shape[:2], -1)
        return by_sample[:, 0] if a.shape[1] == 1 else by_sample.sum(1)

    def bias_grad(self, d: Tensor) -> Tensor:
        """See :class:`LayerProducts`."""
        return d.flatten(3).sum(3).sum(1)

    def input_adjoint(self, w: Tensor, d: Tensor, like: Tensor) -> Tensor:
        """See :class:`LayerProducts`."""
        n = len(like)
        image = self.transposed(
            _beside(d),
            like.reshape(1, -1, *like.shape[2:]),
            self._for_samples(w, n),
            n * self.groups,
        )
        return image.view(like.shape)

    def output_adjoint(
        self, w: Tensor, b: Tensor | None, a: Tensor, like: Tensor
    ) -> Tensor:
        """See :class:`LayerProducts`."""
        n = len(like)
        out = self.convolved(_beside(a), self._for_samples(w, n), n * self.groups)
        out = out.view(n, -1, *out.shape[2:])
        if b is not None:
            out.add_(b.repeat_interleave(n // len(b), 0)[:, :, None, None])
        return out

    def _for_samples(self, w: Tensor, n: int) -> Tensor:
        w = w if len(w) == n else w.repeat_interleave(n // len(w), 0)
        return w.reshape(-1, *self.shape[1:])


@final
class _ByRow(_ChannelsLast):
    """One call of the library for each row: its samples fill it well enough."""

    def weight_grad(self, a: Tensor, d: Tensor) -> Tensor:
        """See :class:`LayerProducts`."""
        # Of the weight only the shape and memory format are looked at.
        w = a.new_empty(self.shape).to(memory_format=torch.channels_last)
        parts = [
            self.correlated(di, ai, w, self.groups) for ai, di in zip(a, d, strict=True)
        ]
        return torch.stack([p.permute(0, 2, 3, 1).reshape(-1) for p in parts])

    def bias_grad(self, d: Tensor) -> Tensor:
        """See :class:`LayerProducts`."""
        return d.sum((1, 3, 4))

    def input_adjoint(self, w: Tensor, d: Tensor, like: Tensor) -> Tensor:
        """See :class:`LayerProducts`."""
        a = like.view(len(d), -1, *like.shape[1:])
        return _joined(
            [
                self.transposed(di, ai, wi, self.groups)
                for di, ai, wi in zip(d, a, self._kernels(w), strict=True)
            ]
        )

    def output_adjoint(
        self, w: Tensor, b: Tensor | None, a: Tensor, like: Tensor
    ) -> Tensor:
        """See :class:`LayerProducts`."""
        how = self.stride, self.padding, self.dilation, self.groups
        return _joined(
            [
                F.conv2d(ai, wi, None if b is None else b[i], *how)
                for i, (ai, wi) in enumerate(zip(a, self._kernels(w), strict=True))
            ]
        )

    def _kernels(self, w: Tensor) -> Tensor:
        rows, channels, height, width = self.shape
        ordered = w.view(-1, rows, height, width, channels)
        return ordered.permute(0, 1, 4, 2, 3)


@final
class _Fitting(_ChannelsLast):
    """Patches where those of a row stay in the cache, the library beyond that.

    A call of the library for a sample or two is mostly preparation.
    """

    def __init__(self, module: nn.Conv2d) -> None:
        super().__init__(module)
        self._few, self._many = Patches(module), _ByRow(module)

    def inputs(self, a: Tensor, rows: int) -> Tensor:
        """See :class:`LayerProducts`."""
        down, across = self.places(a)
        return self._for(down * across * len(a) // rows).inputs(a, rows)

    def backprops(self, delta: Tensor, rows: int) -> Tensor:
        """See :class:`LayerProducts`."""
        return self._for(delta[:, 0].numel() // rows).backprops(delta, rows)

    def weight_grad(self, a: Tensor, d: Tensor) -> Tensor:
        """See :class:`LayerProducts`."""
        return self._of(a).weight_grad(a, d)

    def bias_grad(self, d: Tensor) -> Tensor:
        """See :class:`LayerProducts`."""
        return self._of(d).bias_grad(d)

    def input_adjoint(self, w: Tensor, d: Tensor, like: Tensor) -> Tensor:
        """See :class:`LayerProducts`."""
        return self._of(d).input_adjoint(w, d, like)

    def output_adjoint(
        self, w: Tensor, b: Tensor | None, a: Tensor, like: Tensor
    ) -> Tensor:
        """See :class:`LayerProducts`."""
        return self._of(a).output_adjoint(w, b, a, like)

    def _for(self, positions: int) -> Patches | _ByRow:
        few = positions * self.shape[1:].numel() <= _CACHED
        return self._few if few else self._many

    def _of(self, form: Tensor) -> Patches | _ByRow:
        return self._few if form.ndim == 3 else self._many


def _beside(t: Tensor) -> Tensor:
    """All samples of ``(rows, samples, channels, …)`` as channels of one."""
    return t.reshape(1, -1, *t.shape[3:])


def _unfolded(
    a: Tensor, size: _Sizes, stride: _Sizes, padding: _Sizes, dilation: _Sizes
) -> Tensor:
    """Patches ``(n, positions, kernel · channels)``, channels last."""
    (kh, kw), (sh, sw), (ph, pw), (eh, ew) = size, stride, padding, dilation
    image = F.pad(a.permute(0, 2, 3, 1), (0, 0, pw, pw, ph, ph))
    image = image.contiguous()
    n, height, width, channels = image.shape
    rows = (height - eh * (kh - 1) - 1) // sh + 1
    columns = (width - ew * (kw - 1) - 1) // sw + 1
    by_n, by_row, by_column, _ = image.stride()
    view = image.as_strided(
        (n, rows, columns, kh, kw, channels),
        (by_n, by_row * sh, by_column * sw, by_row * eh, by_column * ew, 1),
    )
    return view.reshape(n, rows * columns, -1)


def _in_format_of(t: Tensor, other: Tensor) -> Tensor:
    """In the other's memory format, so that what follows meets one format only."""
    return t.contiguous() if other.is_contiguous() else t


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


register(nn.Conv2d, _convolution)
