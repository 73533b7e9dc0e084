"""Experiments as YAML files describe them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, final

import yaml

from leakwatch.names import unknown
from leakwatch.reproduction.reading import read_settings
from leakwatch.reproduction.result import Published

if TYPE_CHECKING:
    from leakwatch.reproduction.kinds.base import Kind

__all__ = ["PAPERS", "SCALES", "Experiment", "names", "place_of", "read"]

#: What the papers are called.
PAPERS: Final = {
    "lavp": "Hong et al., Foreseeing Reconstruction Quality of Gradient Inversion: An "
    "Optimization Perspective, AAAI 2024",
    "i2f": "Zhang et al., Understanding Deep Gradient Leakage via Inversion Influence "
    "Functions, NeurIPS 2023",
    "sme": "Zhu, Yao, Blaschko: Surrogate Model Extension (SME): A Fast and Accurate "
    "Weight Update Attack on Federated Learning, ICML 2023",
    "ci-net": "Zhang et al., Generative Gradient Inversion via Over-Parameterized "
    "Networks in Federated Learning, ICCV 2023",
    "leakwatch": "a question of our own",
}
SCALES: Final = ("small", "paper")

_FOLDER: Final = Path(__file__).parents[1] / "configs" / "experiments"


@final
@dataclass(frozen=True)
class Experiment:
    """One table or figure.

    Args:
        paper: among :data:`PAPERS`.
        item: of the paper, such as ``"Table 1"``.
        title: what it shows.
        claim: what the paper concludes from it.
        kind: which kind of experiment.
        scales: settings of the kind at each scale.
        published: name of the file with the paper's numbers; empty: it states none.
        minutes: of one CPU core at small scale, at most, as ``--cells`` says or as was
            measured; None: nobody has looked.
        like: an experiment whose settings apply where these say nothing.
        headline: ``[row, column, part]`` of the number that the claim stands or falls
            with, at small scale.

    Raises:
        ValueError: for a name that nothing has.
    """

    paper: str
    item: str
    title: str
    claim: str
    kind: str
    scales: dict[str, dict[str, Any]]
    published: str = ""
    minutes: float | None = None
    like: str = ""
    headline: tuple[tuple[str, str, str], ...] = ()
    name: str = ""

    def __post_init__(self) -> None:
        if self.paper not in PAPERS:
            raise ValueError(unknown("paper", self.paper, PAPERS))
        for scale in self.scales:
            if scale not in SCALES:
                raise ValueError(unknown("scale", scale, SCALES))

    def content(self, scale: str) -> dict[str, Any]:
        """What the files say at one scale.

        Args:
            scale: one of :data:`SCALES`.

        Raises:
            ValueError: it has no such scale.
        """
        own = self.scales.get(scale)
        if self.like:
            other = read(self.like)
            if other.like:
                raise ValueError(
                    f"{self.name} is like {self.like}, which is like {other.like}; "
                    f"expected one that states its own scales."
                )
            return {**other.content(scale), **(own or {})}
        if own is None:
            raise ValueError(
                f"{self.name} has no scale {scale!r}; it has {', '.join(self.scales)}."
            )
        return dict(own)

    def settings(self, scale: str) -> Kind:
        """The same, read and checked.

        Args:
            scale: one of :data:`SCALES`.

        Raises:
            ValueError: for unknown kinds and keys, and wrong values.
        """
        from leakwatch.reproduction.kinds.base import kinds  # torch takes seconds

        if self.kind not in kinds():
            raise ValueError(unknown("kind", self.kind, kinds()))
        where = f"{self.name}: scales: {scale}"
        found: Kind = read_settings(kinds()[self.kind], self.content(scale), where)
        return found

    @property
    def paper_numbers(self) -> Published | None:
        """Those of the paper, if it states any."""
        return Published.read(self.published) if self.published else None


def names() -> list[str]:
    """Of all experiments that come with the package."""
    return sorted((path.stem for path in _FOLDER.glob("*.yaml")), key=_order)


def read(name: str | Path) -> Experiment:
    """An experiment of the package, or of a file.

    Args:
        name: such as ``"lavp-table-1"``, or the path of a YAML file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: there is no such experiment, or its file is not as it should be.
    """
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        if str(name) not in names():
            raise ValueError(unknown("experiment", name, names()))
        path = _FOLDER / f"{name}.yaml"
    try:
        content = yaml.safe_load(path.read_text("utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"there is no file {path}.") from None
    except OSError as error:
        raise ValueError(f"{path} can't be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text in UTF-8: {error}.") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {error}") from error
    if isinstance(content, Mapping):
        content = {**content, "name": path.stem}
    return read_settings(Experiment, content, path.name)


def place_of(experiment: str, scale: str, data: str | None, output: Path) -> Path:
    """The folder of one experiment's result.

    Args:
        experiment: its name.
        scale: at which.
        data: what it runs on instead of the paper's data, if anything.
        output: folder of all results.
    """
    stem = f"{experiment}-{scale}" + (f"-{data}" if data else "")
    return output / stem


def _order(name: str) -> tuple[str, str, int]:
    stem, _, number = name.rpartition("-")
    paper, _, item = stem.partition("-")
    return paper, item, int(number) if number.isdigit() else 0
