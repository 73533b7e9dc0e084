"""Weight gradients of convolutions for many attacks. See the kernels' module."""

from __future__ import annotations

from typing import Any, cast, final

import torch
from torch import Tensor, nn

from leakwatch.derivatives.layers.kernels import Kernel, Saved

__all__ = ["Convolution", "GroupedConvolution"]


class _Convolution(Kernel):
    def __init__(self, has_weight: bool, has_bias: bool, module: nn.Conv2d) -> None:
        super().__init__(has_weight, has_bias)
        padding = module.padding
        if isinstance(padding, str):
            raise TypeError(f"padding={padding!r} has no fixed size.")
        self.shape = module.weight.shape
        self.groups = module.groups
        self.stride = cast(tuple[int, int], module.stride)
        self.padding = cast(tuple[int, int], padding)
        self.dilation = cast(tuple[int, int], module.dilation)


@final
class Convolution(_Convolution):
    """A convolution as matrix products of unfolded patches, channels last.

    Rows of a kernel lie side by side in memory in this order, so patches are copied,
    and added back, in long runs. For ungrouped convolutions.
    """

    def arrange(self, weight: Tensor) -> Tensor:
        """See :class:`Kernel`."""
        return weight.view(-1, *self.shape).permute(0, 1, 3, 4, 2).flatten(1)

    def restore(self, weight: Tensor) -> Tensor:
        """See :class:`Kernel`."""
        rows, channels, height, width = self.shape
        ordered = weight.view(-1, rows, height, width, channels)
        return ordered.permute(0, 1, 4, 2, 3).flatten(1)

    def form(
        self, a: Tensor, delta: Tensor, attacks: int
    ) -> tuple[list[Tensor], Saved]:
        """See :class:`Kernel`."""
        d = delta.permute(0, 2, 3, 1).reshape(attacks, -1, delta.shape[1])
        columns = self.patches(a).view(attacks, d.shape[1], -1)
        parts = []
        if self.has_weight:
            parts.append(torch.bmm(d.transpose(1, 2), columns).flatten(1))
        if self.has_bias:
            parts.append(d.sum(1))
        # Only their shapes are read of the first two.
        return parts, (a, delta, columns, d)

    def adjoint(
        self, saved: Saved, cotangents: list[Tensor], needs_input: bool
    ) -> tuple[Tensor | None, Tensor]:
        """See :class:`Kernel`."""
        a, delta, columns, d = saved
        u, b = self.split(cotangents)
        given, received = None, None
        if u is not None:
            u = u.reshape(len(d), d.shape[2], columns.shape[2])
            received = torch.bmm(columns, u.transpose(1, 2))
            if needs_input:
                given = self._transposed(u, d, a, delta)
        if b is not None:
            shift = b[:, None]
            received = shift if received is None else received.add_(shift)
        n, rows, height, width = delta.shape
        found = cast(Tensor, received).expand_as(d).reshape(n, height, width, rows)
        return given, _like(found.permute(0, 3, 1, 2), delta)

    def pull(
        self, saved: Saved, u: Tensor | None, weight: Tensor, back: Tensor
    ) -> Tensor:
        """Uᵀδ + Wᵀz̄: all that the input receives when nothing else follows it.

        Args:
            saved: from :meth:`form`.
            u: cotangent of the weight gradient, ``None`` for none.
            weight: W, ``(out, in, height, width)``.
            back: z̄, what the output received.
        """
        a, delta, columns, d = saved
        w = weight.permute(0, 2, 3, 1).flatten(1)
        z = back.permute(0, 2, 3, 1).reshape(-1, len(w))
        total = torch.mm(z, w).view_as(columns)
        if u is not None:
            total.baddbmm_(d, u.reshape(len(d), d.shape[2], -1))
        return self._fold(total, a, delta)

    def _transposed(self, u: Tensor, d: Tensor, a: Tensor, delta: Tensor) -> Tensor:
        """Uᵀδ with a kernel for each attack."""
        rows, channels, kh, kw = self.shape
        ph, pw = kh - 1 - self.padding[0], kw - 1 - self.padding[1]
        plain = self.stride == (1, 1) == self.dilation and min(ph, pw) >= 0
        # Numbers that are moved, over kh · kw: patches of δ and the kernel, against
        # patches of the input, twice.
        positions = d.shape[1]
        if not plain or rows * (positions + 3 * channels) > 2 * positions * channels:
            return self._fold(torch.bmm(d, u), a, delta)
        # A convolution of δ with the kernel turned around.
        columns = _unfolded(delta, (kh, kw), (1, 1), (ph, pw), (1, 1))
        turned = u.view(-1, rows, kh, kw, channels).flip(2, 3)
        turned = turned.permute(0, 2, 3, 1, 4).reshape(len(u), -1, channels)
        found = torch.bmm(columns.view(len(u), -1, turned.shape[1]), turned)
        n, _, height, width = a.shape
        return _like(found.view(n, height, width, channels).permute(0, 3, 1, 2), a)

    def patches(self, a: Tensor) -> Tensor:
        """What the kernel sees of the input at each place, ``(n, places, numbers)``."""
        size = self.shape[2], self.shape[3]
        return _unfolded(a, size, self.stride, self.padding, self.dilation)

    def fold(self, columns: Tensor, a: Tensor, delta: Tensor) -> Tensor:
        """Patches added up to an image, the adjoint of :meth:`patches`.

        Args:
            columns: their numbers, in the order of :meth:`patches`.
            a: gives shape and memory format of the image.
            delta: gives the number of places, ``(n, out, height, width)``.
        """
        return self._fold(columns, a, delta)

    def _fold(self, columns: Tensor, a: Tensor, delta: Tensor) -> Tensor:
        """Adds patches up to an image, the adjoint of unfolding."""
        (kh, kw), (sh, sw) = self.shape[2:], self.stride
        (ph, pw), (eh, ew) = self.padding, self.dilation
        n, channels, height, width = a.shape
        rows, across = delta.shape[2:]
        # Every ``apart``-th patch of a row overlaps none of the others, so that a
        # whole row of each, kw · channels numbers, is added at once.
        apart = -(-kw // sw) if ew == 1 else 1
        wide = max(width + 2 * pw, (across - 1) * sw + ew * (kw - 1) + 1)
        image = columns.new_zeros(n, height + 2 * ph + sh, wide + apart * sw, channels)
        patches = columns.view(n, rows, across, kh, kw, channels)
        by_n, by_row, by_column, _ = image.stride()
        for i in range(kh):
            if ew != 1:
                for j in range(kw):
                    image.as_strided(
                        (n, rows, across, channels),
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
        return _like(inner.permute(0, 3, 1, 2), a)


@final
class GroupedConvolution(_Convolution):
    """A convolution with all samples side by side as groups of one large one.

    The library's own kernels do the work; faster than patches for large images and
    channels that fill vector registers. Also for grouped convolutions.
    """

    def form(
        self, a: Tensor, delta: Tensor, attacks: int
    ) -> tuple[list[Tensor], Saved]:
        """See :class:`Kernel`."""
        a, delta = a.contiguous(), delta.contiguous()
        parts = []
        if self.has_weight:
            n = len(a)
            weight = a.new_empty(()).expand(n * self.shape[0], *self.shape[1:])
            found = self._backward(a, delta, weight, (False, True, False))[1]
            by_sample = found.view(attacks, n // attacks, -1)
            parts.append(by_sample[:, 0] if n == attacks else by_sample.sum(1))
        if self.has_bias:
            by_sample = delta.flatten(2).sum(2)
            parts.append(by_sample.view(attacks, -1, delta.shape[1]).sum(1))
        return parts, (a, delta)

    def adjoint(
        self, saved: Saved, cotangents: list[Tensor], needs_input: bool
    ) -> tuple[Tensor | None, Tensor]:
        """See :class:`Kernel`."""
        a, delta = saved
        u, b = self.split(cotangents)
        each = len(a) // len(cotangents[0])
        given, received = None, None
        if u is not None:
            weight = u.repeat_interleave(each, 0) if each > 1 else u
            weight = weight.reshape(-1, *self.shape[1:])
            received = torch.nn.functional.conv2d(
                _side_by_side(a),
                weight,
                stride=self.stride,
                padding=self.padding,
                dilation=self.dilation,
                groups=len(a) * self.groups,
            ).view(delta.shape)
            if needs_input:
                found = self._backward(a, delta, weight, (True, False, False))[0]
                given = found.view(a.shape)
        if b is not None:
            shift = b.repeat_interleave(each, 0)[:, :, None, None]
            received = shift if received is None else received.add_(shift)
        return given, cast(Tensor, received).expand_as(delta)

    def _backward(
        self, a: Tensor, delta: Tensor, weight: Tensor, mask: tuple[bool, bool, bool]
    ) -> Any:
        return torch.ops.aten.convolution_backward(
            _side_by_side(delta),
            _side_by_side(a),
            weight,
            None,
            self.stride,
            self.padding,
            self.dilation,
            False,
            (0, 0),
            len(a) * self.groups,
            mask,
        )


def _side_by_side(t: Tensor) -> Tensor:
    return t.reshape(1, -1, *t.shape[2:])


def _unfolded(
    a: Tensor,
    size: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
) -> Tensor:
    """Patches ``(n, positions, kernel · channels)``, channels last."""
    (kh, kw), (sh, sw), (ph, pw), (eh, ew) = size, stride, padding, dilation
    image = nn.functional.pad(a.permute(0, 2, 3, 1), (0, 0, pw, pw, ph, ph))
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


def _like(t: Tensor, other: Tensor) -> Tensor:
    """In the other's memory format, so that what follows meets one format only."""
    return t.contiguous() if other.is_contiguous() else t
