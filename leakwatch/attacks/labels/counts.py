"""How often each class occurs in a batch, from the gradient of its last layer.

The bias gradient of class c is P_c − n_c/N, with P the batch's mean softmax and n_c
samples of that class among N. Two ways to P:

- A softmax that hardly depends on the input (untrained networks): P is that of guessed
  inputs (Geng et al. 2021; Dimitrov et al. 2022), and N (P_c − b_c) are whole numbers
  up to what P is wrong by.
- Otherwise P depends on what is in the batch. The ratio of weight and bias gradient of
  a class approximates the features of its samples (Ma et al. 2023); the layer's own
  softmax of those gives a column p_k − e_k for each class k, of which the bias gradient
  is the n_k/N-weighted sum. Whole numbers are then improved one by one, judged by how
  well they explain the whole gradient when the features are solved for again.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from leakwatch.attacks.labels.last_layer import Head, HeadGradient
from leakwatch.status import OK, Status

__all__ = ["count_labels", "present_classes"]

# A softmax whose standard deviation over guesses stays below this is steady. Untrained
# networks have up to 0.07, networks after one epoch from 0.2 on.
_STEADY: Final = 0.1
# N (P_c − b_c) may be this far from whole numbers to be trusted.
_WHOLE: Final = 0.25
_ROUNDING: Final = 1e-6
_SEARCH_CLASSES: Final = 32
_REFITS: Final = 3
_MOVES: Final = 64


def present_classes(
    head: Head, g: HeadGradient, noise_std: float = 0.0
) -> Bool[Tensor, " classes"]:
    """Classes that are certainly in the batch.

    Without a sample of class c, the bias gradient P_c is not negative, and neither is
    any entry of its weight gradient if no feature is.

    Args:
        head: the layer.
        g: its gradient.
        noise_std: standard deviation of known noise on every entry; the gradient may
            show more. Entries that noise explains prove nothing.

    Returns:
        One flag per class.
    """
    # The most of so many normal numbers, and a margin.
    most = math.sqrt(2 * math.log(g.weight.numel())) + 2
    noise_std = max(noise_std, g.noise)
    below = max(most * noise_std, _ROUNDING * float(g.bias.abs().max()))
    present = g.bias < -below
    if head.nonnegative:
        below = max(most * noise_std, _ROUNDING * float(g.weight.abs().max()))
        present = present | (g.weight.amin(1) < -below)
    return present


def count_labels(
    head: Head, g: HeadGradient, images: int, noise_std: float = 0.0
) -> tuple[Int[Tensor, " classes"], Status]:
    """The number of samples of each class, adding up to ``images``.

    Args:
        head: the layer.
        g: its gradient, of the mean loss.
        images: samples in the batch.
        noise_std: standard deviation of known noise on every entry.

    Returns:
        Counts, and ``ok`` where the gradient itself confirms them, ``estimated`` where
        repeated labels are the best guess only.
    """
    certain = present_classes(head, g, noise_std)
    if int(certain.sum()) > images:
        lowest = g.bias.masked_fill(~certain, torch.inf).argsort()[:images]
        certain = torch.zeros_like(certain)
        certain[lowest] = True
    if head.softmax_std < _STEADY:
        raw = images * (head.softmax - g.bias)
        counts = _whole(raw, certain.double(), images)
        off = float((raw - counts).abs().max())
        if off < _WHOLE:
            return counts.long(), OK
        return counts.long(), Status(
            "estimated", f"the counts are up to {off:.1f} away from whole numbers"
        )
    if not bool(certain.any()):
        certain[g.bias.argmin()] = True
    counts = _Explanation(head, g, images, certain).best()
    if int(certain.sum()) == images:
        return counts, OK
    return counts, Status(
        "estimated",
        f"{int(certain.sum())} classes are certain, how the {images} samples divide "
        f"among them is the best guess",
    )


class _Explanation:
    """Counts, as an explanation of the gradient of the layer."""

    def __init__(
        self, head: Head, g: HeadGradient, images: int, certain: Tensor
    ) -> None:
        self.classes = certain.nonzero().flatten()
        self.images = images
        self.g = g
        # The features lie in the row space of the weight gradient: few numbers each.
        left, size, right = torch.linalg.svd(g.weight, full_matrices=False)
        self.rows = left * size
        self.to_logits = head.weight @ right.T
        self.bias = head.bias
        self.one_hot = torch.eye(head.classes, dtype=torch.float64)[self.classes]
        slope = g.bias[self.classes]
        usable = slope < 0
        features = self.rows[self.classes] / torch.where(usable, slope, 1.0)[:, None]
        if bool(usable.any()):
            features[~usable] = features[usable].mean(0)
        else:
            features = torch.zeros_like(features)
        self.first = self._softmax(features)

    def best(self) -> Int[Tensor, " classes"]:
        counts = self._start()
        if len(self.classes) <= _SEARCH_CLASSES:
            counts = self._improved(counts)
        out = torch.zeros(len(self.g.bias), dtype=torch.long)
        out[self.classes] = counts.long()
        return out

    def _softmax(self, features: Tensor) -> Tensor:
        logits: Tensor = features @ self.to_logits.T + self.bias
        return logits.softmax(1)

    def _start(self) -> Tensor:
        columns = (self.first - self.one_hot).T
        # The last row, heavily weighted, says that all counts add up to the batch.
        ones = columns.new_full((1, len(self.classes)), 10.0)
        wanted = torch.cat([self.images * self.g.bias, ones[0, :1] * self.images])
        counts = torch.linalg.lstsq(
            torch.cat([columns, ones]), wanted[:, None], driver="gelsd"
        ).solution[:, 0]
        return _whole(counts, torch.ones_like(counts), self.images)

    def _misfit(self, counts: Tensor) -> float:
        p, share = self.first, counts / self.images
        for step in range(_REFITS):
            mix = (share[:, None] * (p - self.one_hot)).T
            features = torch.linalg.lstsq(
                mix, self.rows, rcond=1e-8, driver="gelsd"
            ).solution
            if step < _REFITS - 1:
                p = self._softmax(features)
        weight = (mix @ features - self.rows).norm() / self.rows.norm()
        bias = (mix.sum(1) - self.g.bias).norm() / self.g.bias.norm()
        return float(weight + bias)

    def _improved(self, counts: Tensor) -> Tensor:
        best = self._misfit(counts)
        for _ in range(_MOVES):
            tries = []
            for i in (counts > 1).nonzero().flatten().tolist():
                for j in range(len(counts)):
                    if i != j:
                        moved = counts.clone()
                        moved[i] -= 1
                        moved[j] += 1
                        tries.append((self._misfit(moved), moved))
            least = min(tries, key=lambda t: t[0], default=(best, counts))
            if not least[0] < best:
                break
            best, counts = least
        return counts


def _whole(counts: Tensor, least: Tensor, total: int) -> Tensor:
    """Whole numbers near ``counts``, not below ``least``, that add up to ``total``."""
    rest = (counts - least).clamp(min=0)
    left = total - int(least.sum())
    rest = rest if float(rest.sum()) > 0 else torch.ones_like(rest)
    rest = rest * (left / rest.sum())
    # What rounding made of a whole number must not be cut down to the next one.
    whole = (rest + _ROUNDING).floor()
    missing = left - int(whole.sum())
    whole[(rest - whole).argsort(descending=True)[:missing]] += 1
    return whole + least
