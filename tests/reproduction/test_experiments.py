"""Every experiment that comes along says what it needs, without a mistake."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from leakwatch.models import build_model
from leakwatch.reproduction import names, read
from leakwatch.reproduction.experiment import SCALES
from leakwatch.reproduction.result import Published


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("scale", SCALES)
def test_settings_are_read_at_both_scales(name: str, scale: str) -> None:
    experiment = read(name)
    settings = experiment.settings(scale)
    assert settings.data_names
    assert experiment.claim
    assert experiment.title
    other = settings.on("mnist_sample")
    assert other.data_names == ("mnist_sample",)
    assert {need.data for need in other.needed()} <= {"mnist_sample"}
    small, factors = settings.piece()
    assert type(small) is type(settings)
    assert all(factor > 0 for factor in factors.values())


def test_files_that_are_none_are_named(tmp_path: Path) -> None:
    folder, latin, own = (tmp_path / f"{n}.yaml" for n in ("folder", "latin", "own"))
    folder.mkdir()
    with pytest.raises(ValueError, match=r"folder\.yaml can't be read"):
        read(folder)
    latin.write_bytes("paper: é".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.yaml is no text in UTF-8"):
        read(latin)
    content = {"paper": "lavp", "item": "t", "title": "t", "claim": "c"}
    content |= {"kind": "correlation", "like": str(own), "scales": {}}
    own.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match="expected one that states its own scales"):
        read(own).content("small")


#: Channels, side and classes of the data sets.
SHAPES = {
    "mnist": (1, 28, 10),
    "fashion_mnist": (1, 28, 10),
    "cifar10": (3, 32, 10),
    "cifar100": (3, 32, 100),
    "imagenette": (3, 32, 10),
    "imagewoof": (3, 32, 10),
    "imagenet": (3, 224, 1000),
    "femnist": (1, 28, 62),
}


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("scale", SCALES)
def test_networks_fit_their_data(name: str, scale: str) -> None:
    built = set()
    for need in read(name).settings(scale).needed():
        if (need.data, need.name) in built:
            continue
        built.add((need.data, need.name))
        channels, side, classes = SHAPES[need.data]
        with torch.device("meta"):
            net = build_model(
                need.network.model,
                in_channels=channels,
                num_classes=classes,
                image_size=side,
                model_args=need.network.model_args,
            )
            assert net.eval()(torch.empty(2, channels, side, side)).shape == (
                2,
                classes,
            )


@pytest.mark.parametrize("name", names())
def test_rows_beside_ours_are_in_the_paper(name: str) -> None:
    experiment = read(name)
    published = experiment.paper_numbers
    for row in experiment.settings("small").beside().values():
        assert published is not None
        assert row in published.values


def test_published_numbers_are_complete() -> None:
    folder = resources.files("leakwatch.reproduction") / "published"
    for file in folder.iterdir():
        content = json.loads(file.read_text("utf-8"))
        assert content["source"]
        assert content["where"]
        for row, columns in content["values"].items():
            for column, numbers in columns.items():
                assert 0 < len(numbers) <= len(content["parts"]), (file, row, column)


def test_a_number_of_the_paper() -> None:
    found = Published.read("lavp-table-1")
    assert found.at("C-10+CS", "ang_min", "mse") == 0.64
    assert found.at("C-10+CS", "nothing", "mse") is None
    with pytest.raises(ValueError, match=r"no published numbers lavp-table-9\.json"):
        Published.read("lavp-table-9")


def changed(path: Path, change: dict[str, Any], **small: Any) -> Path:
    content = yaml.safe_load(path.read_text())
    content.update(change)
    content["scales"]["small"].update(small)
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.mark.parametrize(
    ("change", "small", "message"),
    [
        ({"kidn": "x"}, {}, "unknown key 'kidn'; did you mean 'kind'?"),
        ({"kind": "corelation"}, {}, "did you mean 'correlation'?"),
        ({"paper": "lapv"}, {}, "did you mean 'lavp'?"),
        (
            {},
            {"image": 3},
            "scales: small: unknown key 'image'; did you mean 'images'?",
        ),
        ({}, {"images": "ten"}, "images: expected int, got 'ten'"),
        ({}, {"images": 2}, "images must be at least 3"),
        ({}, {"seeds": True}, "seeds: expected int, got True"),
        ({}, {"metrics": ["psrn"]}, "psrn"),
        ({}, {"columns": {"max": "lavp_max"}}, "unknown score of a column 'lavp_max'"),
        (
            {},
            {"rows": [{"data": "cifar", "attack": "L2"}]},
            "unknown data set 'cifar'; did you mean 'cifar10'?",
        ),
        (
            {},
            {"networks": {"a": {"model": "linear", "optimizer": "sdg"}}},
            "networks: a: optimizer: unknown choice 'sdg'; did you mean 'sgd'?",
        ),
        (
            {},
            {"attacks": {"L2": {"preset": "lavp-l3"}}},
            "did you mean 'lavp-l2'",
        ),
    ],
)
def test_a_mistake_is_named(
    tiny: Path, change: dict[str, Any], small: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read(changed(tiny, change, **small)).settings("small")


def test_a_missing_key_and_a_missing_scale_are_named(tiny: Path) -> None:
    content = yaml.safe_load(tiny.read_text())
    del content["scales"]["small"]["attacks"]
    tiny.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match="the key 'attacks' is missing"):
        read(tiny).settings("small")
    with pytest.raises(ValueError, match="tiny has no scale 'paper'; it has small"):
        read(tiny).settings("paper")


def test_an_unknown_experiment_is_named() -> None:
    with pytest.raises(ValueError, match="did you mean 'lavp-table-1'"):
        read("lavp-tabel-1")
    with pytest.raises(FileNotFoundError, match=r"no file nowhere\.yaml"):
        read("nowhere.yaml")
