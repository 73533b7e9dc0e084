"""An experiment from its file to its result, at toy size."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import leakwatch
from leakwatch.attacks import attack
from leakwatch.quality import quality
from leakwatch.reporting.statistics.correlation import spearman
from leakwatch.reproduction import Result, estimate, read, reproduce, run
from leakwatch.reproduction.cells import Lab
from leakwatch.reproduction.cells import decode as decode_outcome
from leakwatch.reproduction.cells import encode as encode_outcome
from leakwatch.reproduction.data import open_data
from leakwatch.reproduction.kinds.base import AttackSettings
from leakwatch.reproduction.networks import (
    Network,
    Trained,
    decode,
    encode,
    train,
)


def test_numbers_are_those_of_the_public_functions(tiny: Path, tmp_path: Path) -> None:
    result, where = reproduce(
        read(tiny), scale="small", output=tmp_path / "out", say=lambda line: None
    )
    data = open_data("mnist_sample", "nowhere")
    samples = data.samples(6)
    rhos = []
    for seed in (0, 1):
        network = Network("linear", epochs=1, images=64)
        trained = train(network, data.module, seed)
        net = network.build(data.module, trained.states[1])
        scores = leakwatch.score(
            net, samples.x, samples.y, "lavp_l2_max", mean=samples.mean, std=samples.std
        )
        found = attack(
            net,
            samples.x,
            samples.y,
            "lavp-l2",
            steps=3,
            restarts=1,
            mean=samples.mean,
            std=samples.std,
        )
        got = quality(found.images, samples.x, mean=samples.mean, std=samples.std)
        rhos.append(spearman(scores["lavp_l2_max"].numpy(), got["mse"].numpy()).rho)
    (entry,) = [
        e
        for e in result.entries
        if (e.row, e.column, e.part) == ("digits+L2", "max", "mse")
    ]
    assert entry.value == pytest.approx(np.mean(rhos), abs=1e-4)
    assert entry.n == 12
    assert Result.read(where / "result.json") == result
    table = (where / "table.md").read_text()
    assert "*paper: C-10+L2* | +0.35 / -0.35 | +0.51 / -0.51" in table
    assert "attacks matched their gradient" in table


def test_it_goes_on_where_it_was_killed(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    true = AttackSettings.run

    def counted(self: AttackSettings, *args: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return true(self, *args, **more)

    monkeypatch.setattr(AttackSettings, "run", counted)
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        reproduce(read(tiny), scale="small", output=out, say=lambda line: None)
    assert len(calls) == 3
    first, _ = reproduce(read(tiny), scale="small", output=out, say=lambda line: None)
    # Two of the four attacks were there.
    assert len(calls) == 5
    again, _ = reproduce(read(tiny), scale="small", output=out, say=lambda line: None)
    assert len(calls) == 5
    assert again == first


def test_training_is_repeatable_and_kept_whole() -> None:
    data = open_data("mnist_sample", "nowhere").module
    network = Network(
        "linear", epochs=2, images=64, keep=(0, 1), optimizer="sgd", lr=0.1
    )
    one, two = train(network, data, 3), train(network, data, 3)
    assert one.states.keys() == {0, 1, 2}
    back = decode(json.loads(json.dumps(encode(one))))
    for epoch, state in one.states.items():
        for key, value in state.items():
            torch.testing.assert_close(value, two.states[epoch][key], rtol=0, atol=0)
            torch.testing.assert_close(value, back.states[epoch][key], rtol=0, atol=0)
    assert not torch.equal(one.states[0]["fc.weight"], one.states[2]["fc.weight"])
    assert back.accuracy == one.accuracy


def test_a_network_that_learnt_nothing_is_named(tiny: Path, tmp_path: Path) -> None:
    text = tiny.read_text("utf-8")
    found = {}
    for lr in (1e-9, 1e-2):
        path = tmp_path / "other.yaml"
        path.write_text(text.replace("epochs: 1", f"lr: {lr}\n        epochs: 10"))
        said: list[str] = []
        result, _ = reproduce(
            read(path), scale="small", output=tmp_path / "out", say=said.append
        )
        found[lr] = [note for note in result.notes if "has learnt nothing" in note]
        assert all(any(note in line for line in said) for note in found[lr])
    # Of seed 1 more than 15 % are right before training too.
    (note,) = found[1e-9]
    assert note.startswith("linear on mnist_sample, seed 0 has learnt nothing in 10")
    assert found[1e-2] == []


def test_missing_data_is_said_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        reproduce(
            read("lavp-table-1"),
            scale="small",
            output=tmp_path,
            root=tmp_path,
            say=lambda line: None,
        )
    said = str(caught.value)
    assert "lavp-table-1: the data set cifar10 is missing" in said
    assert "https://www.cs.toronto.edu/~kriz/cifar.html" in said
    assert "--data mnist_sample" in said


def test_arrays_stand_in_for_files_and_are_named(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (100, 32, 32, 3), np.uint8)
    labels = np.arange(100) % 10
    np.savez(
        tmp_path / "cifar10.npz",
        train_images=images,
        train_labels=labels,
        test_images=images[:20],
        test_labels=labels[:20],
    )
    found = open_data("cifar10", tmp_path)
    assert found.words == "C-10 (from cifar10.npz): Array, 90 training images"
    assert found.samples(10).y.tolist() == list(range(10))


def test_an_estimate_adds_up(tiny: Path) -> None:
    found = estimate(read(tiny), scale="small", most=1)
    assert (found.cells, found.networks) == (6, 2)
    assert 0 < found.hours < 1
    assert any("an epoch of linear" in line for line in found.timed)


def test_an_epoch_is_told_from_a_part_of_it(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int | None] = []

    def second_an_image(network: Network, *where: Any) -> Trained:
        seen.append(network.images)
        found = train(network, *where)
        return replace(found, seconds=float(network.images or 0) + 7.0, learning=20.0)

    monkeypatch.setattr(run, "_TIMED", 20)
    monkeypatch.setattr(run, "trainer", lambda network: second_an_image)
    found = estimate(read(tiny), scale="small", most=1)
    # 20 of 64 images took 20 of 27 seconds; the rest is spent once a network.
    assert seen == [20]
    assert "an epoch of linear on mnist_sample: 64.0 s, 1 in all" in found.timed[0]
    assert found.hours * 3600 == pytest.approx(2 * (64 + 7), rel=0.1)


def test_cells_can_be_sent_to_other_processes(tiny: Path) -> None:
    settings = read(tiny).settings("small")
    data = {"mnist_sample": open_data("mnist_sample", "nowhere")}
    trained = {
        need.place: train(need.network, data[need.data].module, need.seed)
        for need in settings.needed()
    }
    for cell in settings.cells(Lab(data, trained)):
        work = cell.work()
        call, arguments = pickle.loads(pickle.dumps((work.call, work.arguments)))
        found = call(*arguments)
        again = decode_outcome(json.loads(json.dumps(encode_outcome(found))))
        assert again.place == cell.place
        assert again.columns.keys() == found.columns.keys()


@pytest.mark.long
def test_two_processes_find_the_same(tiny: Path, tmp_path: Path) -> None:
    def found(n_jobs: int) -> Result:
        output = tmp_path / str(n_jobs)
        return reproduce(
            read(tiny), scale="small", output=output, n_jobs=n_jobs, say=lambda _: None
        )[0]

    one, two = found(1), found(2)
    assert one.entries == two.entries
    assert one.networks == two.networks
