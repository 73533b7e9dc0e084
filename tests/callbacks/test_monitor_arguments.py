from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from jsonargparse import ArgumentParser
from torch import nn

from leakwatch import ProbeSet
from leakwatch.callbacks import InversionAudit, LeakageMonitor, UpdateAudit
from leakwatch.callbacks.probe_callback import ProbeCallback, RecordingCallback


def probes() -> ProbeSet:
    return ProbeSet.from_tensors(torch.rand(2, 1, 4, 4), [0, 1])


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"probes": 0}, ValueError, r"probes must be at least 1, got 0; .*probes=32"),
        ({"probes": True}, TypeError, r"probes must be a ProbeSet or how many.*bool"),
        ({"probes": "32"}, TypeError, r"probes must be a ProbeSet or how many.*str"),
        ({"probes": 3.0}, TypeError, r"probes must be a ProbeSet or how many.*float"),
        ({"scores": ["lavp", "psnr"]}, ValueError, r"'psnr'.*i2f.*lavp"),
        ({"scores": []}, ValueError, r"scores is empty; .*\['lavp', 'i2f'\]"),
        ({"scores": 3}, TypeError, r"scores must be names .*got 3; .*'lavp', 'i2f'"),
        ({"every_n_epochs": 0}, ValueError, r"every_n_epochs must be at least 1.*0"),
        ({"every_n_epochs": True}, TypeError, r"every_n_epochs must be an int.*True"),
        ({"every_n_epochs": "2"}, TypeError, r"every_n_epochs must be an int.*'2'"),
        ({"every_n_epochs": 1.5}, TypeError, r"every_n_epochs must be an integer.*1.5"),
        ({"at_start": "no"}, TypeError, r"at_start must be True or False, got 'no'"),
        ({"at_start": 1}, TypeError, r"at_start must be True or False, got 1"),
        ({"noise_std": 0}, ValueError, r"noise_std must be positive and finite, got 0"),
        ({"noise_std": -1e-3}, ValueError, r"noise_std must be positive.*got -0.001"),
        ({"noise_std": float("nan")}, ValueError, r"noise_std must be positive.*nan"),
        ({"noise_std": float("inf")}, ValueError, r"noise_std must be positive.*inf"),
        ({"noise_std": "1e-4"}, TypeError, r"noise_std must be a number.*'1e-4' \(str"),
        ({"noise_std": True}, TypeError, r"noise_std must be a number.*True"),
        ({"noise_std": None}, TypeError, r"noise_std must be a number.*None"),
        ({"epsilon": -1}, ValueError, r"epsilon must be at least 0 and finite, got -1"),
        ({"prior_std": 0.0}, ValueError, r"prior_std must be positive"),
        ({"data_range": -1}, ValueError, r"data_range must be positive"),
        ({"target_psnr": float("nan")}, ValueError, r"target_psnr must be finite"),
        ({"max_memory": 0}, ValueError, r"max_memory must be positive"),
        ({"products": 0}, ValueError, r"products must be at least 1"),
        ({"seed": -1}, ValueError, r"seed must be at least 0"),
        ({"mean": [0.5]}, ValueError, r"give both or neither"),
        ({"std": [0.5]}, ValueError, r"give both or neither"),
        ({"mean": [0.5], "std": [0.0]}, ValueError, r"std must be positive.*\[0.0\]"),
        ({"mean": [0.5], "std": [1, 1]}, ValueError, r"mean has 1 entries and std 2"),
        ({"mean": "a", "std": [1]}, TypeError, r"mean must be one finite number per"),
        ({"mean": [None], "std": [1]}, TypeError, r"mean must be one finite number"),
        (
            {"probes": probes(), "mean": [0.5], "std": [0.5]},
            ValueError,
            r"a ProbeSet has its own: ProbeSet.from_dataset\(dataset, mean",
        ),
        ({"criterion": "mse"}, TypeError, r"criterion must be a function .*got str"),
        ({"solver": "exakt"}, ValueError, r"solver must be one of .*'exakt'"),
        ({"criterion": nn.CrossEntropyLoss()}, TypeError, r"Loss takes \(input: "),
        ({"criterion": lambda x, y: x}, TypeError, r"\(module, x, y\).*\(x, y\)"),
        ({"dtype": "float16"}, ValueError, r"'float32' or 'float64', got 'float16'"),
        ({"dtype": torch.float16}, ValueError, r"'float32' or 'float64'"),
        ({"directory": ""}, ValueError, r"directory is empty"),
        ({"directory": 3}, TypeError, r"directory must be a path or None, got 3"),
        ({"report": "yes"}, TypeError, r"report must be True or False"),
        ({"log_images": "false"}, TypeError, r"log_images must be True or False"),
        ({"verbose": 2}, TypeError, r"verbose must be True or False"),
        ({"name": "a/b"}, ValueError, r"letters, digits.*got 'a/b'"),
        ({"name": ""}, ValueError, r"letters, digits"),
        ({"name": ".."}, ValueError, r"letters, digits"),
        ({"name": None}, TypeError, r"name must be a string"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_at_construction(
    arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        LeakageMonitor(**arguments)


def test_an_empty_probe_set_can_t_be_made() -> None:
    with pytest.raises(ValueError, match=r"at least one probe"):
        ProbeSet.from_tensors(torch.rand(0, 1, 4, 4), [])


def test_the_defaults() -> None:
    parameters = inspect.signature(LeakageMonitor).parameters
    assert {name: p.default for name, p in parameters.items()} == {
        "probes": 32,
        "scores": ("lavp", "i2f"),
        "every_n_epochs": 1,
        "at_start": True,
        "noise_std": 1e-4,
        "epsilon": 0.0,
        "prior_std": None,
        "prior": None,
        "data_range": None,
        "mean": None,
        "std": None,
        "target_psnr": 20.0,
        "prepare": None,
        "criterion": None,
        "solver": "auto",
        "dtype": "float32",
        "max_memory": 2048,
        "products": 100,
        "parameters": None,
        "layers": False,
        "precision": "exact",
        "budget": None,
        "seed": 0,
        "directory": None,
        "report": True,
        "live": True,
        "log": "summary",
        "log_images": False,
        "log_ledger": False,
        "verbose": True,
        "name": "leakwatch",
    }


def test_what_callbacks_share_is_an_argument_of_each_with_its_default() -> None:
    def defaults(kind: type) -> dict[str, Any]:
        parameters = inspect.signature(kind).parameters
        assert not any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return {name: p.default for name, p in parameters.items()}

    recording, probing = defaults(RecordingCallback), defaults(ProbeCallback)
    # A round is audited after it; attacks invert what all parameters share.
    for kind, base, without in (
        (UpdateAudit, recording, {"at_start"}),
        (LeakageMonitor, recording | probing, set()),
        (InversionAudit, recording | probing, {"parameters"}),
    ):
        own = defaults(kind)
        assert base.keys() - own.keys() == without
        changed = {"noise_std", "name", "at_start", "probes", "scores", "products"}
        changed.add("precision")  # audits look at everything
        for name in base.keys() - without - changed:
            assert own[name] == base[name], name


def test_a_config_that_was_read_states_every_argument() -> None:
    parser = ArgumentParser()
    parser.add_subclass_arguments(LeakageMonitor, "monitor")
    stated = vars(parser.parse_string(YAML).monitor.init_args)
    parameters = inspect.signature(LeakageMonitor).parameters
    assert stated.keys() == parameters.keys()
    assert (stated["products"], stated["target_psnr"]) == (100, 20.0)


def test_a_path_object_is_a_directory() -> None:
    assert LeakageMonitor(directory=Path("a") / "b").directory == "a/b"  # type: ignore[arg-type]


def test_numpy_numbers_are_numbers() -> None:
    built = LeakageMonitor(
        noise_std=np.float32(0.5),  # type: ignore[arg-type]
        every_n_epochs=np.int64(3),  # type: ignore[arg-type]
    )
    assert (type(built.noise_std), type(built.every_n_epochs)) == (float, int)
    assert (built.noise_std, built.every_n_epochs) == (0.5, 3)


YAML = """
monitor:
  class_path: leakwatch.callbacks.LeakageMonitor
  init_args:
    probes: 16
    scores: [lavp, i2f, loss]
    every_n_epochs: 5
    at_start: false
    noise_std: 1e-3
    epsilon: 0
    mean: [0.5, 0.5, 0.5]
    std: [0.25, 0.25, 0.25]
    prior_std: null
    data_range: 1
    criterion: torch.nn.functional.cross_entropy
    solver: exact
    dtype: float64
    max_memory: 512
    seed: 3
    directory: runs/demo
    log_images: true
    name: second
"""


def test_plain_yaml_builds_it() -> None:
    parser = ArgumentParser()
    parser.add_subclass_arguments(LeakageMonitor, "monitor")
    # Called `instantiate_classes` before jsonargparse 4.49.
    make = getattr(parser, "instantiate", None) or parser.instantiate_classes
    built = make(parser.parse_string(YAML)).monitor
    assert type(built) is LeakageMonitor
    assert built.given == 16
    names = [score.name for score in built.scores]
    assert names[:5] == [
        "lavp_l2_max", "lavp_l2_min", "lavp_cos_max", "lavp_cos_min", "lavp_fusion",
    ]  # fmt: skip
    assert {"i2f", "loss", "grad_norm"} <= set(names)
    assert (built.every_n_epochs, built.at_start) == (5, False)
    assert (built.noise_std, built.epsilon, built.data_range) == (1e-3, 0.0, 1.0)
    assert (built.mean, built.std) == ((0.5,) * 3, (0.25,) * 3)
    assert built.criterion is torch.nn.functional.cross_entropy
    assert (built.solver, built.dtype, built.max_memory) == ("exact", "float64", 512)
    assert (built.directory, built.name, built.log_images) == (
        "runs/demo", "second", True,
    )  # fmt: skip


def test_yaml_mistakes_name_the_argument() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(LeakageMonitor, "monitor")
    with pytest.raises(Exception, match="every_n_epochs"):
        parser.parse_string(YAML.replace("every_n_epochs: 5", "every_n_epochs: often"))


@pytest.mark.parametrize("callback", [LeakageMonitor, InversionAudit, UpdateAudit])
def test_an_unknown_argument_is_of_what_was_called(callback: type) -> None:
    with pytest.raises(TypeError) as caught:
        callback(every_n_epoch=3)
    assert str(caught.value).startswith(
        f"{callback.__name__} has no argument 'every_n_epoch'; did you mean "
        "'every_n_epochs'? it has "
    )
