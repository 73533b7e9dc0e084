"""What a recorded run says about itself, so that a command can repeat it."""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self, final

from leakwatch.reporting import RiskLedger, Row

#: Why a run can't be had again, and what to do then; after a semicolon.
ONLY_FIT: Final = (
    "only runs of `leakwatch fit` can be scored or attacked from the command line. In "
    "Python leakwatch.score(module, x, y) and leakwatch.attack(module, x, y) do it, "
    "with the network and samples of your own script."
)

_TIMES: Final = ("seconds", "time_fraction")


@final
@dataclass(frozen=True)
class Record:
    """A run that a command recorded.

    Attributes:
        directory: Where it is.
        told: What the command was told, from ``run.json``.
        name: Of the callback whose settings applied.
        probes: Indices and fingerprint of the samples.
        loss_factors: By which its training multiplied losses.
    """

    directory: Path
    told: Mapping[str, Any]
    name: str | None
    probes: Mapping[str, Any]
    loss_factors: Mapping[str, float]

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read a run directory.

        Raises:
            ValueError: Its ``run.json`` does not say how to build it again.
        """
        metadata = RiskLedger.open(directory).read_metadata()
        told, arguments = metadata.get("subject"), metadata.get("arguments")
        probes = arguments.get("probes") if isinstance(arguments, dict) else None
        config = metadata.get("config")
        if not isinstance(told, dict) or not isinstance(told.get("config"), dict):
            saved = directory / "config.yaml"
            instead = f"give --config and --ckpt instead of --from: --config={saved}"
            raise ValueError(
                f"{directory} does not say how to build its network and data again; "
                f"{instead if saved.is_file() else ONLY_FIT}"
            )
        return cls(
            directory=directory,
            told=told,
            name=config.get("name") if isinstance(config, dict) else None,
            probes={
                "indices": probes.get("index"),
                "fingerprint": probes.get("fingerprint"),
            }
            if isinstance(probes, dict)
            else {},
            loss_factors=metadata.get("loss_factors", {}),
        )

    def fill_in(self, options: argparse.Namespace) -> None:
        """Take from the record what the command line does not say.

        Args:
            options: Of ``leakwatch audit`` or ``leakwatch attack``.
        """
        for name in ("split", "probes", "device"):
            if getattr(options, name) is None:
                setattr(options, name, self.told.get(name))
        checkpoint = self.told.get("checkpoint")
        if options.ckpt is None and isinstance(checkpoint, dict):
            options.ckpt = checkpoint.get("path")

    def probes_of(self, split: str) -> Mapping[str, Any] | None:
        """Return indices and fingerprint of the samples, if they are of this split.

        Args:
            split: "train" or "val".
        """
        return self.probes if split == self.told.get("split", "train") else None

    def check(self, checkpoint: str, sha256: str) -> None:
        """Refuse a checkpoint that was changed since.

        Args:
            checkpoint: Its path.
            sha256: Of its bytes now.

        Raises:
            ValueError: It is the recorded one, and has other bytes.
        """
        then = self.told.get("checkpoint")
        if not isinstance(then, dict) or then.get("path") != checkpoint:
            return
        if then.get("sha256") != sha256:
            raise ValueError(
                f"{checkpoint} is not the file that {self.directory} was recorded "
                f"with: it was written again since. --ckpt names another one."
            )

    @contextmanager
    def config(self) -> Iterator[list[str]]:
        """Give the recorded config as options of LightningCLI."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.yaml"
            path.write_text(json.dumps(self.told["config"]))  # JSON is YAML
            yield ["--config", str(path)]

    def compare(self, directory: Path) -> str:
        """Say how the values of another run differ, in one sentence.

        Args:
            directory: Of the run that should be the same.
        """
        old, new = _values(self.directory), _values(directory)
        common = old.keys() & new.keys()
        moments = ", ".join(
            f"epoch {epoch}, step {step}"
            for epoch, step in sorted({key[:2] for key in old})
        )
        if not common:
            return (
                f"{self.directory} has other moments ({moments}) or quantities: "
                f"nothing to compare"
            )
        apart = [key for key in common if not _same(old[key], new[key])]
        text = f"{len(common) - len(apart)} of {len(common)} values are equal to those"
        text += f" of {self.directory}"
        if apart:
            key = max(apart, key=lambda k: _distance(old[k], new[k]))
            text += (
                f"; furthest apart is {key[3]} of sample {key[2]}, "
                f"{old[key].value!r} then, {new[key].value!r} now"
            )
        return text


_Key = tuple[int, int, int | None, str]


def _values(directory: Path) -> dict[_Key, Row]:
    return {
        (row.epoch, row.step, row.sample, row.quantity): row
        for row in RiskLedger.open(directory).rows()
        if row.quantity not in _TIMES
    }


def _same(one: Row, other: Row) -> bool:
    both_nan = math.isnan(one.value) and math.isnan(other.value)
    return one.status == other.status and (one.value == other.value or both_nan)


def _distance(one: Row, other: Row) -> float:
    apart = abs(one.value - other.value) / max(abs(one.value), abs(other.value), 1e-300)
    return math.inf if math.isnan(apart) else apart
