"""Weight initialisations of I²F, Section 5.3, by name.

Zhang et al., "Inversion Influence Function" (NeurIPS 2023), find that the way a
model is initialised changes how much its first gradients give away: uniform worst,
then normal, then kaiming and xavier. `leakwatch.compare_initializations` measures it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from leakwatch.names import meant

Filler = Callable[[Tensor, torch.Generator | None], object]
#: Changes a module in place, with a generator (None: the global one).
Initializer = Callable[[nn.Module, torch.Generator | None], object]

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMAL_STD = math.sqrt(0.5)


@dataclass(frozen=True)
class Scheme:
    """How one initialisation fills a weight and a bias.

    Args:
        weight: Fills a float32 CPU tensor of the weight's shape in place, given a
            generator (None: the global one).
        bias: The same for a bias.
        meaning: One line for lists and error texts.
    """

    weight: Filler
    bias: Filler
    meaning: str


def _zeros(tensor: Tensor, generator: torch.Generator | None) -> object:
    return tensor.zero_()


def _uniform(tensor: Tensor, generator: torch.Generator | None) -> object:
    return tensor.uniform_(-0.5, 0.5, generator=generator)


def _normal(tensor: Tensor, generator: torch.Generator | None) -> object:
    return tensor.normal_(0.0, _NORMAL_STD, generator=generator)


def _kaiming(tensor: Tensor, generator: torch.Generator | None) -> object:
    return nn.init.kaiming_normal_(
        tensor, mode="fan_in", nonlinearity="relu", generator=generator
    )


def _xavier(tensor: Tensor, generator: torch.Generator | None) -> object:
    return nn.init.xavier_uniform_(tensor, gain=1.0, generator=generator)


def _orthogonal(tensor: Tensor, generator: torch.Generator | None) -> object:
    return nn.init.orthogonal_(tensor, gain=1.0, generator=generator)


@dataclass(frozen=True)
class _FanIn:
    """What `reset_parameters` of PyTorch's layers does, from a given generator.

    U(±1/√fan_in) for weights and biases, which differs from a `Scheme` in that the
    bias depends on its layer's weight.
    """

    meaning: str = "U(±1/√fan_in), weights and biases: PyTorch's own, drawn anew"

    def __call__(self, module: nn.Module, generator: torch.Generator | None) -> None:
        for _, layer in _layers(module, "pytorch"):
            bound = math.prod(layer.weight.shape[1:]) ** -0.5

            def fill(
                t: Tensor, g: torch.Generator | None, bound: float = bound
            ) -> object:
                return t.uniform_(-bound, bound, generator=g)

            _write(layer.weight, fill, generator)
            if layer.bias is not None:
                _write(layer.bias, fill, generator)


_SCHEMES: dict[str, Scheme | Initializer | None] = {
    "default": None,
    "uniform": Scheme(_uniform, _uniform, "U(-0.5, 0.5), weights and biases"),
    "normal": Scheme(_normal, _normal, "N(0, variance 0.5), weights and biases"),
    "kaiming": Scheme(_kaiming, _zeros, "He normal, fan-in, gain sqrt(2); biases 0"),
    "xavier": Scheme(_xavier, _zeros, "Glorot uniform, gain 1; biases 0"),
    "orthogonal": Scheme(
        _orthogonal, _zeros, "rows or columns orthonormal, gain 1; biases 0"
    ),
    "pytorch": _FanIn(),
}


def register_scheme(name: str, scheme: Scheme | Initializer) -> None:
    """Make an initialisation available by name.

    Args:
        name: What `initialize(module, name)` will ask for.
        scheme: How it fills weights and biases, or a function of module and generator
            that does it all.

    Raises:
        ValueError: The name is taken.
    """
    if name in _SCHEMES:
        raise ValueError(
            f"An initialization named {name!r} is already registered; choose "
            "another name."
        )
    _SCHEMES[name] = scheme


def registered_schemes() -> tuple[str, ...]:
    """Return the registered names in alphabetical order."""
    return tuple(sorted(_SCHEMES))


def check_scheme(name: str) -> None:
    """Raise when an initialisation is not known.

    Raises:
        ValueError: The message lists the registered names and their meaning.
    """
    if name not in _SCHEMES:
        listed = "; ".join(
            f"{key} ({_meaning(scheme)})" for key, scheme in sorted(_SCHEMES.items())
        )
        near = meant(name, _SCHEMES)
        raise ValueError(f"Unknown initialization {name!r}; {near}known: {listed}.")


def _meaning(scheme: Scheme | Initializer | None) -> str:
    if scheme is None:
        return "leaves the layers as built"
    return str(getattr(scheme, "meaning", "a function of your own"))


@torch.no_grad()
def initialize(
    module: nn.Module, scheme: str | Initializer, seed: int | None = None
) -> nn.Module:
    """Initialise every linear and convolutional layer of a module in place.

    | scheme | weights | biases |
    |---|---|---|
    | `uniform` | U(−0.5, 0.5) | the same |
    | `normal` | N(0, 0.5): *variance* 0.5, standard deviation √0.5 | the same |
    | `kaiming` | N(0, 2/fan_in): He et al. 2015, Eq. 10; gain √2 | 0 |
    | `xavier` | U(±√(6/(fan_in + fan_out))): Glorot & Bengio 2010, Eq. 16; gain 1 | 0 |
    | `orthogonal` | orthonormal rows or columns (Saxe et al. 2014); gain 1 | 0 |
    | `pytorch` | U(±1/√fan_in): what PyTorch's layers draw for themselves | the same |
    | `default` | as the layers were built | the same |

    The source is I²F (Zhang et al., NeurIPS 2023), Section 5.3. For `normal` the
    authors' code differs from their text: it takes 0.5 as the standard deviation and
    leaves biases as they are; this is the text. The variants of kaiming and xavier
    are not stated there: these are the forms of the papers that I²F cites.

    Normalisation layers, embeddings and bare parameters (the packed projection of
    `nn.MultiheadAttention` among them) are left alone. Numbers are drawn in float32
    on the CPU whatever the module's device and dtype, so that one seed gives the
    same weights everywhere.

    Args:
        module: Changed in place.
        scheme: A registered name, or a function ``(module, generator)`` that changes
            the module in place.
        seed: Draws come from a generator of their own, started here, and the global
            one is not touched. None: the global CPU generator.

    Returns:
        The module that was given.

    Raises:
        TypeError: ``scheme`` is neither a name nor a function.
        ValueError: Unknown scheme; no layer to initialise; or a layer whose weight
            can't be written (parametrized, or lazy and not yet materialised).

    Example:
        >>> layer = initialize(nn.Linear(1000, 100), "uniform", seed=0)
        >>> bool(layer.weight.abs().max() <= 0.5), round(layer.weight.std().item(), 2)
        (True, 0.29)
    """
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    fill = _resolve(scheme)
    if isinstance(fill, Scheme):
        for _, layer in _layers(module, str(scheme)):
            _write(layer.weight, fill.weight, generator)
            if layer.bias is not None:
                _write(layer.bias, fill.bias, generator)
    elif fill is not None:
        fill(module, generator)
    return module


def _resolve(scheme: str | Initializer) -> Scheme | Initializer | None:
    if isinstance(scheme, str):
        check_scheme(scheme)
        return _SCHEMES[scheme]
    if not callable(scheme):
        raise TypeError(
            "scheme must be the name of an initialization, such as 'kaiming', or a "
            f"function (module, generator) -> None, got {scheme!r}."
        )
    return scheme


def _layers(module: nn.Module, scheme: str) -> list[tuple[str, Any]]:
    """Linear and convolutional layers, all of which can be written."""
    layers = [(n, m) for n, m in module.named_modules() if isinstance(m, _LAYERS)]
    if not layers:
        raise ValueError(
            f"initialization={scheme!r} found no linear or convolutional layer in "
            f"{type(module).__name__}; use initialization='default'."
        )
    for name, layer in layers:
        if parametrize.is_parametrized(layer) or nn.parameter.is_lazy(layer.weight):
            raise ValueError(
                f"Can't initialise layer {name!r}: its weight is parametrized or not "
                "yet materialised. Initialise before adding a parametrization, and "
                "after the first forward of a lazy layer."
            )
    return layers


def _write(target: Tensor, fill: Filler, generator: torch.Generator | None) -> None:
    values = torch.empty(target.shape, dtype=torch.float32)
    fill(values, generator)
    target.copy_(values)
