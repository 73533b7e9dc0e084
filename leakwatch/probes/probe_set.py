"""ProbeSet: the samples that are watched over training."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.utils.data import Dataset

from leakwatch.checks import check_integer, check_number
from leakwatch.derivatives.runtime.rng_and_precision import isolated_rng, seed_streams
from leakwatch.normalization import Channels, check_channels, to_pixels
from leakwatch.priors import GaussianPrior
from leakwatch.probes.checks import (
    check_finite,
    check_index,
    check_indices,
    check_inputs,
    check_range,
    check_targets,
    checked_fields,
)
from leakwatch.probes.dataset_state import DatasetState
from leakwatch.probes.items import (
    dataset_of,
    dataset_size,
    is_class,
    read_item,
)
from leakwatch.probes.pipeline import find_class_names, find_normalization
from leakwatch.probes.samplers import sampled_items
from leakwatch.probes.scale import (
    from_pixels_slope,
    measure_prior,
    resolve_range,
    uniform_prior,
)
from leakwatch.probes.selection import draw_items

__all__ = ["ProbeSet"]

# Items from which statistics are measured: enough for those of small images, and for
# large ones as many as hold this many numbers together.
_PRIOR_SAMPLES = 2048
_PRIOR_NUMBERS = 2**24
_FEWEST_SAMPLES = 64


@final
@dataclass(frozen=True, eq=False, repr=False)
class ProbeSet:
    """A fixed set of samples, identified by data-set index.

    Build one with `from_dataset`, `from_loader` or `from_tensors`; change a field with
    `dataclasses.replace`.

    *Pixel units* are those before normalisation: x = (pixel - mean) / std, per
    channel, the second dimension of `x`.

    Attributes:
        x: network inputs, float32 (float64 if given so), on the CPU, a copy.
        y: class indices, int64, or another target of each for a criterion: several
            labels, soft labels, numbers, masks.
        index: data-set index of each probe, its identity over epochs.
        data_range: peak value for PSNR, in pixel units; 1.0 when mean and std are
            known.
        prior_std: root of the mean pixel variance of the data, in pixel units.
        prior_mean: mean image in pixel units, of the shape of one sample.
        prior: mean and covariance of the data, what an attacker knows who has samples
            like these; None where too few were there to measure it.
        class_names: name of each class.
        mean: of the normalisation that was applied, per channel or one for all.
        std: as `mean`.
        units: "pixel" if pixel values are known, else "input": every quantity "in
            pixel units" is then in the units of `x`.

    Raises:
        TypeError: integer inputs, or arguments of a wrong kind.
        ValueError: no probes, values that are not finite, invalid labels, duplicated
            indices, shapes that do not fit each other, scales that are not positive.

    Example:
        >>> import torch
        >>> x = torch.linspace(0, 1, 32).reshape(2, 1, 4, 4)
        >>> ProbeSet.from_tensors(x, torch.tensor([0, 3]))
        ProbeSet(n=2, shape=(1, 4, 4), classes=2, units='pixel')
    """

    x: Float[Tensor, "n ..."]
    y: Shaped[Tensor, "n ..."]
    index: tuple[int, ...]
    data_range: float
    prior_std: float
    prior_mean: Float[Tensor, " ..."]
    class_names: tuple[str, ...] | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    units: Literal["pixel", "input"] = "pixel"
    prior: GaussianPrior | None = None

    def __post_init__(self) -> None:
        for name, value in checked_fields(self).items():
            object.__setattr__(self, name, value)

    @classmethod
    def from_dataset(
        cls,
        dataset: Dataset[Any] | Sequence[Any],
        n: int = 32,
        per_class: int | None = None,
        seed: int = 0,
        mean: Channels | None = None,
        std: Channels | None = None,
        class_names: Sequence[str] | None = None,
        indices: Sequence[int] | None = None,
        max_scan: int = 4096,
        *,
        data_range: float | None = None,
        prior_samples: int | None = None,
        among: Sequence[int] | None = None,
    ) -> ProbeSet:
        """Draw a class-stratified set from a map-style data set.

        The same seed and data set give the same probes, whatever the state of the
        global random streams. These are left as they were, and so is the data set:
        handles that it opens and caches that it fills while it is read are gone
        afterwards. A random augmentation of an item depends on (`seed`, index) only.

        Items are (input, label), (input, label, anything), or mappings or named tuples
        with the keys image/x and label/y. Each class gets n // classes probes; classes
        drawn at random get one more, and classes that run out leave theirs to the
        others. Where labels are no class indices, items are drawn at random, and
        scoring them takes a criterion.

        Without `mean` and `std` a transform called `Normalize` is looked for, then the
        attributes `mean` and `std` of the data set (used if some input lies outside of
        [0, 1]). The prior (mean image, covariance of the pixels) is measured on
        `prior_samples` items drawn at random; if fewer than 16 are available, on 16 or
        more probes; else it is that of uniform pixels: data_range / 2 and
        data_range / sqrt(12).

        Args:
            dataset: has `__len__` and `__getitem__`.
            n: number of probes; ignored with `per_class` or `indices`.
            per_class: probes per class.
            seed: of the drawing.
            mean: of the normalisation, one number or one per channel, in pixel units.
            std: as `mean`.
            class_names: default: `dataset.classes`, if it has them.
            indices: exactly these items, in this order.
            max_scan: items read to learn labels, where the data set has no list of
                them; classes that do not occur among them are not drawn.
            data_range: peak value for PSNR, in pixel units. Default: 1.0 if pixels
                are known to lie in [0, 1], else the range of the probes.
            prior_samples: items read to measure the prior, those that can't be read
                passed over. Default: 2,048, or fewer where an item has more than 8,192
                numbers.
            among: indices of the items that may be drawn and read, such as those of a
                sampler; `indices` may lie elsewhere.

        Raises:
            TypeError: an iterable-style data set, integer images, unreadable items.
            ValueError: an argument out of range, or as in the constructor.

        Warns:
            UserWarning: fewer items than asked for; drawn items that can't be read,
                which others replace; pixels outside of [0, 1].

        Example:
            >>> import torch
            >>> data = [(torch.full((1, 2, 2), i / 9), i % 2) for i in range(10)]
            >>> ProbeSet.from_dataset(data, per_class=2).y.bincount()
            tensor([2, 2])
        """
        check_integer("n", n)
        check_integer("max_scan", max_scan)
        if prior_samples is not None:
            check_integer("prior_samples", prior_samples, smallest=0)
        check_integer("seed", seed, smallest=0)
        if per_class is not None:
            check_integer("per_class", per_class)
        state = DatasetState(dataset)

        def read(index: int) -> tuple[Float[Tensor, " ..."], Tensor]:
            # Seeded per item: an augmentation must not depend on what was read before.
            item_seed = (seed * 1_000_003 + index) % 2**32
            seed_streams(item_seed)
            state.seed(item_seed)
            return read_item(dataset, index)

        with isolated_rng(seed), state.restored():
            size = dataset_size(dataset)
            within = list(range(size) if among is None else check_indices(among, size))
            if indices is None:
                chosen, items = draw_items(
                    dataset, within, n, per_class, max_scan, seed, read
                )
            else:
                chosen = check_indices(indices, size)
                items = [read(index) for index in chosen]
            x = _stack([x for x, _ in items], chosen)
            y = _stack([target for _, target in items], chosen, "target of item")
            if mean is None and std is None:
                outside = bool((x < 0).any() or (x > 1).any())
                pair = find_normalization(dataset, trust_attributes=outside)
                if pair is not None and _fits(pair, x):
                    mean, std = pair
            if class_names is None:
                named = find_class_names(dataset)
                if named is not None and is_class(y[0]) and int(y.max()) < len(named):
                    class_names = named
            if prior_samples is None:
                most = max(_PRIOR_NUMBERS // x[0].numel(), _FEWEST_SAMPLES)
                prior_samples = min(most, _PRIOR_SAMPLES)
            # The same items whatever is drawn, so that a resumed run measures the same.
            stream = torch.Generator(device="cpu").manual_seed(0)
            order = torch.randperm(len(within), generator=stream, device="cpu")
            measured = order[:prior_samples].sort().values
            others = _readable(read, [within[i] for i in measured])
            fields = _fields(x, y, chosen, mean, std, class_names, data_range, others)
        return cls(**fields)

    @classmethod
    def from_loader(
        cls,
        dataloader: Any,
        n: int = 32,
        per_class: int | None = None,
        seed: int = 0,
        mean: Channels | None = None,
        std: Channels | None = None,
        class_names: Sequence[str] | None = None,
        indices: Sequence[int] | None = None,
        max_scan: int = 4096,
        *,
        data_range: float | None = None,
        prior_samples: int | None = None,
    ) -> ProbeSet:
        """Draw from `dataloader.dataset`; see `from_dataset` for the arguments.

        The loader is never iterated, and its sampler and generator are left as they
        were: one batch more would change the order of training. Items that its sampler
        leaves out are neither drawn nor read.

        Raises:
            TypeError: `dataloader` has no `dataset`, or as in `from_dataset`.
        """
        return cls.from_dataset(
            dataset_of(dataloader),
            n,
            per_class,
            seed,
            mean,
            std,
            class_names,
            indices,
            max_scan,
            data_range=data_range,
            prior_samples=prior_samples,
            among=sampled_items(dataloader, seed),
        )

    @classmethod
    def from_tensors(
        cls,
        x: Tensor,
        y: Tensor | Sequence[Any],
        index: Sequence[int] | None = None,
        mean: Channels | None = None,
        std: Channels | None = None,
        class_names: Sequence[str] | None = None,
        *,
        data_range: float | None = None,
    ) -> ProbeSet:
        """Take given samples as the probes.

        Args:
            x: network inputs, shape (n, ...).
            y: class indices, shape (n,), or other targets, shape (n, ...).
            index: identity of each probe; default 0, 1, ....
            mean: of the normalisation that was applied, in pixel units.
            std: as `mean`.
            class_names: name of each class.
            data_range: as in `from_dataset`.

        The prior comes from the probes when there are 16 or more, else it is that of
        uniform pixels.
        """
        x = check_inputs(x)
        for name, items in (("index", index), ("class_names", class_names)):
            if not isinstance(items, Iterable | type(None)):
                raise TypeError(f"{name} must be one item for each, got {items!r}.")
        names = list(range(len(x))) if index is None else list(index)
        return cls(**_fields(x, y, names, mean, std, class_names, data_range, []))

    def __len__(self) -> int:
        return len(self.x)

    def __repr__(self) -> str:
        # No pixel values: these samples are private and reprs end up in logs.
        targets = f"targets={tuple(self.y.shape[1:])} of {self.y.dtype}"
        if self.has_classes:
            targets = f"classes={len(set(self.labels))}"
        return (
            f"ProbeSet(n={len(self)}, shape={tuple(self.x.shape[1:])}, {targets}, "
            f"units={self.units!r})"
        )

    @property
    def has_classes(self) -> bool:
        """Whether the targets are class indices."""
        return is_class(self.y[0])

    @property
    def labels(self) -> tuple[int | None, ...]:
        """Class of each probe; None where targets are no class indices."""
        return tuple(self.y.tolist()) if self.has_classes else (None,) * len(self)

    def pixels(self) -> Float[Tensor, "n ..."]:
        """The probes in pixel units; `x` itself where these are unknown."""
        return to_pixels(self.x.double(), self.mean, self.std).to(self.x.dtype)

    def input_scale(self) -> Float[Tensor, " d_x"]:
        """d(input)/d(pixel) of each element of a flattened sample, in float64.

        That is 1/std of its channel, and ones where std is unknown. A Jacobian with
        respect to inputs becomes one with respect to pixels by scaling its columns.

        Example:
            >>> import torch
            >>> x = torch.zeros(1, 2, 1, 2)
            >>> probes = ProbeSet.from_tensors(x, [0], mean=[0.5, 0.5], std=[0.5, 0.2])
            >>> probes.input_scale()
            tensor([2., 2., 5., 5.], dtype=torch.float64)
        """
        return from_pixels_slope(self.x.shape[1:], self.std)

    def class_of(self, i: int) -> str:
        """Name of the class of probe `i`, or its number if classes have no names.

        Empty where targets are no class indices.
        """
        label = self.labels[i]
        if label is None:
            return ""
        return str(label) if self.class_names is None else self.class_names[label]

    def check_labels(self, num_classes: int) -> None:
        """Check the labels against a model with `num_classes` outputs.

        Raises:
            ValueError: a label is too large.
        """
        if not self.has_classes:
            raise ValueError(f"{self!r} has no class indices to check")
        check_range(self.y, self.index, num_classes)

    def split(self, rank: int, world_size: int) -> ProbeSet:
        """The share of one process: probes rank, rank + world_size, ....

        Raises:
            ValueError: `rank` is not in [0, world_size), or has no probe because
                there are fewer probes than processes.
        """
        if not 0 <= rank < world_size:
            raise ValueError(f"rank={rank}; expected 0 to {world_size - 1}")
        if rank >= len(self):
            raise ValueError(
                f"rank={rank} has none of {len(self)} probes; expected at least "
                f"world_size={world_size} probes: draw more, or skip this rank"
            )
        return self.select(range(rank, len(self), world_size))

    def select(self, positions: Sequence[int]) -> ProbeSet:
        """Some of the probes, with what is known of the data set they come from.

        Args:
            positions: of the probes to keep, in this order.
        """
        part = list(positions)
        return dataclasses.replace(
            self,
            x=self.x[part],
            y=self.y[part],
            index=tuple(self.index[i] for i in part),
        )

    def fingerprint(self) -> str:
        """SHA-256 over inputs, labels and indices: equal for equal probes."""
        digest = hashlib.sha256(f"{self.x.dtype}{tuple(self.x.shape)}".encode())
        digest.update(self.x.numpy().tobytes())
        digest.update(repr((self.y.tolist(), self.index)).encode())
        return digest.hexdigest()


def _fields(
    x: Tensor,
    y: Tensor | Sequence[Any],
    index: list[int],
    mean: Channels | None,
    std: Channels | None,
    class_names: Sequence[str] | None,
    data_range: float | None,
    others: Iterable[Float[Tensor, " ..."]],
) -> dict[str, Any]:
    """The constructor's arguments; it checks them again, the scale needs them valid."""
    x = check_inputs(x)
    check_index(tuple(index), len(x))
    check_finite(x, tuple(index))
    means, stds = check_channels(mean, std, x.shape)
    if data_range is not None:
        data_range = check_number("data_range", data_range, "(-inf, inf)", example=1.0)
    peak, units = resolve_range(x, means, stds, data_range)
    prior = measure_prior(others, x.shape[1:], means, stds)
    prior = prior or measure_prior(x, x.shape[1:], means, stds)
    if prior is None:
        centre, spread = uniform_prior(x, peak, units)
    else:
        centre, spread = prior.mean, prior.std
    return {
        "x": x,
        "y": check_targets(y, len(x)),
        "index": tuple(index),
        "data_range": float(peak),
        "prior_mean": centre.to(x.dtype),
        "prior_std": spread,
        "prior": prior,
        "class_names": None if class_names is None else tuple(class_names),
        "mean": means,
        "std": stds,
        "units": units,
    }


def _readable(
    read: Callable[[int], tuple[Tensor, Tensor]], indices: Iterable[int]
) -> Iterator[Float[Tensor, " ..."]]:
    """The inputs of those items that can be read."""
    for index in indices:
        try:
            x, _ = read(index)
        except Exception:
            continue
        yield x


def _stack(
    inputs: list[Tensor], index: list[int], what: str = "item"
) -> Shaped[Tensor, "n ..."]:
    for x, i in zip(inputs, index, strict=True):
        if x.shape != inputs[0].shape:
            raise ValueError(
                f"{what} {index[0]} has shape {tuple(inputs[0].shape)} and {what} {i} "
                f"has shape {tuple(x.shape)}; expected probes of one shape: resize or "
                "crop in the data set's transform"
            )
    double = any(x.dtype == torch.float64 for x in inputs)
    return torch.stack([x.double() if double else x for x in inputs])


def _fits(pair: tuple[tuple[float, ...], ...], x: Tensor) -> bool:
    return x.ndim > 1 and all(len(values) in (1, x.shape[1]) for values in pair)
