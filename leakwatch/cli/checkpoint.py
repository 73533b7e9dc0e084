"""Reading a checkpoint file, and putting its weights into a module."""

from __future__ import annotations

import hashlib
import pickle
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from leakwatch.reporting.ledger.claim import LOCK, claim

_MOST_NAMED = 4


@final
@dataclass(frozen=True)
class Checkpoint:
    """What an audit needs of a checkpoint.

    Attributes:
        path: The file.
        weights: Name to parameter or buffer.
        epoch: Completed epochs when it was saved; 0 where it does not say.
        step: Optimiser steps then; 0 where it does not say.
        callbacks: State of each callback by its key; empty where there is none.
        sha256: Of the file.
    """

    path: Path
    weights: Mapping[str, Tensor]
    epoch: int
    step: int
    callbacks: Mapping[str, Any]
    sha256: str = ""


def read_checkpoint(file: Path, *, trust: bool = False) -> Checkpoint:
    """Read a Lightning checkpoint, or a plain state_dict.

    Args:
        file: The file, which exists.
        trust: Also unpickle arbitrary Python objects, which can run any code.

    Raises:
        ValueError: It is no checkpoint, or holds objects and is not trusted.
    """
    content = _load(file, trust)
    if not isinstance(content, Mapping):
        raise ValueError(
            f"{file} holds a {type(content).__name__}, expected a Lightning checkpoint "
            f"or a state_dict, such as torch.save(module.state_dict(), path)."
        )
    weights = content.get("state_dict", content)
    named = isinstance(weights, Mapping) and len(weights) > 0
    if not named or not all(isinstance(value, Tensor) for value in weights.values()):
        raise ValueError(
            f"{file} has no weights: expected a Lightning checkpoint with "
            f"'state_dict', or a plain state_dict of tensors."
        )
    about = content if "state_dict" in content else {}
    step, callbacks = about.get("global_step", 0), about.get("callbacks", {})
    return Checkpoint(
        path=file,
        weights=weights,
        epoch=_completed_epochs(content),
        step=step if isinstance(step, int) else 0,
        callbacks=callbacks if isinstance(callbacks, Mapping) else {},
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
    )


def load_weights(module: nn.Module, checkpoint: Checkpoint) -> None:
    """Put a checkpoint's weights into a module, all of them or none.

    Args:
        module: Of the architecture that was saved.
        checkpoint: What was saved.

    Raises:
        ValueError: Names or shapes differ; the message says which.
    """
    expected = module.state_dict()
    lacking = [name for name in expected if name not in checkpoint.weights]
    surplus = [name for name in checkpoint.weights if name not in expected]
    other = [
        f"{name} {tuple(given.shape)} instead of {tuple(expected[name].shape)}"
        for name, given in checkpoint.weights.items()
        if name in expected and given.shape != expected[name].shape
    ]
    model = _describe(module)
    differences = [
        f"{what} {_some(names)}"
        for what, names in (
            ("the checkpoint lacks", lacking),
            ("the model has no", surplus),
            ("shapes differ:", other),
        )
        if names
    ]
    if differences:
        raise ValueError(
            f"{checkpoint.path} does not fit the config's model, {model}: "
            f"{'; '.join(differences)}. Use the config of the run that saved it, "
            f"config.yaml in that run's directory."
        )
    module.load_state_dict(dict(checkpoint.weights))


def free_directory(
    asked: str | None, checkpoint: Checkpoint | None, command: str
) -> Path:
    """Claim a directory that holds nothing yet: nothing overwrites another's results.

    Args:
        asked: What the user wants; None: named after the command.
        checkpoint: Beside which it is then; None: in the current directory.
        command: Which.
    """
    above = Path() if checkpoint is None else checkpoint.path.parent
    beside = above / f"leakwatch-{command}"
    path = beside if asked is None else Path(asked).expanduser()
    free, number = path, 0
    while _holds_something(free) or not claim(free) or _holds_something(free):
        number += 1
        free = path.with_name(f"{path.name}-{number}")
    return free


def _holds_something(path: Path) -> bool:
    if not path.is_dir():
        return path.exists()
    return any(entry.name != LOCK for entry in path.iterdir())


def _load(file: Path, trust: bool) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=not trust)
    except pickle.UnpicklingError as error:
        if "weights_only" in str(error) and zipfile.is_zipfile(file):
            raise ValueError(
                f"{file} holds Python objects besides tensors, and reading those can "
                f"run any code; add --trust if you know where the file comes from."
            ) from error
        raise ValueError(f"{file} is not a PyTorch checkpoint.") from error
    except Exception as error:  # on other bytes the unpickler fails in any way
        raise ValueError(
            f"{file} is not a PyTorch checkpoint, or is damaged "
            f"({type(error).__name__}: {error})."
        ) from error


def _completed_epochs(content: Mapping[str, Any]) -> int:
    """Epochs done; during validation Lightning has not counted the running one yet."""
    try:
        loop = content["loops"]["fit_loop"]
        progress = loop["epoch_progress"]["current"]
        done, begun = int(progress["processed"]), int(progress["ready"])
        last = loop["epoch_loop.batch_progress"]["is_last_batch"]
    except (KeyError, TypeError, ValueError):
        epoch = content.get("epoch", 0)
        return epoch if isinstance(epoch, int) else 0
    return done + 1 if done < begun and last else done


def _describe(module: nn.Module) -> str:
    inner = getattr(module, "model", None)
    name = type(module).__name__
    return f"{name} of {type(inner).__name__}" if isinstance(inner, nn.Module) else name


def _some(names: list[str]) -> str:
    rest = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")
