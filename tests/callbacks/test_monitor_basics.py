from __future__ import annotations

import importlib.machinery
import json
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from monitor_cases import (
    CLASSES,
    Tiny,
    dataset,
    fit,
    loader,
    moments_of,
    monitor,
    rows_of,
    trainer,
)
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
)

from leakwatch import ProbeSet, score
from leakwatch.callbacks import GradientDefense, InversionAudit, LeakageMonitor
from leakwatch.callbacks._probing import session
from leakwatch.defenses import Budget, GaussianNoise
from leakwatch.reporting import (
    LedgerTable,
    RiskLedger,
    spread_of_classes,
    summarize_classes,
    worst_samples,
)


class Manual(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self(x), y))
        optimizer.step()


class TwoOptimizers(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        x, y = batch
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self(x), y))
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        first, last = self.net[1], self.net[3]
        return (
            torch.optim.SGD(first.parameters(), lr=0.1),
            torch.optim.SGD(last.parameters(), lr=0.1),
        )


class OwnLoader(Tiny):
    def train_dataloader(self) -> DataLoader[Any]:
        return loader()


class Data(L.LightningDataModule):
    class_names = ("ant", "bee", "cat")
    mean, std = (0.5,), (0.25,)

    def train_dataloader(self) -> DataLoader[Any]:
        x, y = dataset().tensors
        return DataLoader(TensorDataset((x - 0.5) / 0.25, y), batch_size=4)


@pytest.mark.parametrize(
    ("module", "steps"), [(Tiny, 6), (Manual, 6), (TwoOptimizers, 12), (OwnLoader, 6)]
)
def test_any_classifier_is_watched(
    tmp_path: Path, module: type[Tiny], steps: int
) -> None:
    watched = monitor()
    run = trainer(tmp_path, watched)
    if module is OwnLoader:
        run.fit(module())
    else:
        run.fit(module(), train_dataloaders=loader())
    assert moments_of(watched) == [(0, 0), (1, steps)]
    rows = [r for r in rows_of(watched) if r.sample is not None]
    # Few draws of the noise may leave the mean over it uncertain.
    drawn = {r.status for r in rows if r.quantity == "i2f_range_psnr"}
    assert {s.split(":")[0] for s in drawn} <= {"ok", "estimated"}
    assert {r.status for r in rows if r.quantity != "i2f_range_psnr"} == {"ok"}


def test_the_issue_s_own_example(tmp_path: Path) -> None:
    watched = LeakageMonitor()
    fit(tmp_path, watched, data=loader(40, batch_size=10))
    assert watched.probes is not None
    assert len(watched.probes) == 32
    assert watched.run_directory == str(tmp_path / "leakwatch-run")
    assert (tmp_path / "leakwatch-run" / "report.html").is_file()
    assert watched.noise_std == 1e-4


def test_values_are_those_of_the_score_function(tmp_path: Path) -> None:
    module, watched = Tiny(), monitor(dtype="float64", noise_std=1e-3, probes=5)
    fit(tmp_path, watched, module=module)
    probes = watched.probes
    assert probes is not None
    expected = score(
        module,
        probes.x,
        probes.y,
        ["lavp", "i2f", "grad_norm", "loss"],
        noise_std=1e-3,
        prior=probes.prior,
        dtype=torch.float64,
    )
    rows = [r for r in rows_of(watched) if r.epoch == 1 and r.sample is not None]
    assert {r.quantity for r in rows} == set(expected)
    for name in expected:
        found = {r.sample: r.value for r in rows if r.quantity == name}
        assert tuple(found) == probes.index
        torch.testing.assert_close(
            torch.tensor(list(found.values()), dtype=torch.float64),
            expected[name],
            rtol=1e-9,
            atol=0,
        )


def test_the_record_holds_classes_spread_worst_samples_spectra_and_time(
    tmp_path: Path,
) -> None:
    watched = monitor(probes=6, log="all")
    run = fit(tmp_path, watched)
    probes, directory = watched.probes, watched.run_directory
    assert probes is not None
    assert directory is not None
    assert sorted(probes.y.tolist()) == [0, 0, 1, 1, 2, 2]
    table = LedgerTable.from_rows(rows_of(watched))
    moment = table.moments[-1]
    for name in ("i2f", "lavp_l2_max", "lavp_fusion", "grad_norm"):
        column = table.columns[moment, name]
        assert column.samples == probes.index
        means = [
            np.mean(
                [v for v, y in zip(column.values, column.labels, strict=True) if y == c]
            )
            for c in range(CLASSES)
        ]
        classes = summarize_classes(column)
        np.testing.assert_allclose([c.mean for c in classes], means, rtol=1e-12)
        spread = spread_of_classes(classes)
        gini = sum(abs(a - b) for a in means for b in means) / (
            2 * CLASSES * sum(means)
        )
        found = run.callback_metrics
        group = "" if name == "lavp_l2_max" else "-detail"
        for key, value in {
            f"leakwatch-detail/{name}/class_ratio": max(means) / min(means),
            f"leakwatch-detail/{name}/class_gini": gini,
            f"leakwatch-class/1/{name}": means[1],
            f"leakwatch{group}/{name}/median": np.median(column.values),
        }.items():
            np.testing.assert_allclose(float(found[key]), value, rtol=1e-5)
        np.testing.assert_allclose(spread.gini, gini, rtol=1e-9)
    i2f = table.columns[moment, "i2f"]
    order = np.argsort(i2f.values)
    assert worst_samples(i2f, -1, 2) == [probes.index[i] for i in order[:2]]
    spectra = RiskLedger.open(directory).spectra()
    assert [int(s["epoch"]) for s in spectra] == [0, 1]
    assert spectra[1]["eigenvalues"].shape == (6, 16)
    assert tuple(spectra[1]["sample"].tolist()) == probes.index
    assert spectra[1]["class"].tolist() == probes.y.tolist()
    top = table.columns[moment, "lavp_l2_max"].values
    np.testing.assert_allclose(spectra[1]["eigenvalues"][:, 0], top, rtol=1e-12)
    seconds = table.run_level[moment, "seconds"].value
    fraction = table.run_level[moment, "time_fraction"].value
    assert seconds > 0
    assert 0 < fraction < 1
    start = table.run_level[table.moments[0], "time_fraction"]
    assert np.isnan(start.value)
    assert start.status == "undefined: no training yet"


@pytest.mark.parametrize("noise_std", [1e-4, 0.1])
def test_noise_that_nobody_adds_is_said(tmp_path: Path, noise_std: float) -> None:
    stated = monitor(noise_std=noise_std, report=True)
    fit(tmp_path / "bare", stated)
    defense = GradientDefense(GaussianNoise(Budget(0.1, "std")))
    fit(tmp_path / "defended", monitor(noise_std=noise_std), defense)
    said = [
        json.loads((tmp_path / run / "leakwatch-run" / "run.json").read_text())[
            "assumed"
        ]
        for run in ("bare", "defended")
    ]
    assert said[1] == []
    if noise_std == 0.1:
        assert "no defense of this run adds the noise" in said[0][0]
        page = (tmp_path / "bare" / "leakwatch-run" / "report.html").read_text("utf-8")
        assert "No defense of this run adds the noise" in page
    else:
        assert said[0] == []


def test_the_run_s_metadata_state_what_is_assumed(tmp_path: Path) -> None:
    watched = monitor(
        noise_std=2e-3, epsilon=1e-6, prior_std=0.2, data_range=2.0, target_psnr=25
    )
    fit(tmp_path, watched, max_epochs=1)
    metadata = json.loads((tmp_path / "leakwatch-run" / "run.json").read_text())
    assumed = {
        "noise_std": 2e-3,
        "epsilon": 1e-6,
        "prior_std": 0.2,
        "data_range": 2.0,
        "target_psnr": 25.0,
    }
    assert {k: metadata["config"][k] for k in assumed} == assumed
    assert metadata["data_range"] == 2.0
    assert metadata["prior_std"] == 0.2
    assert metadata["solver_used"] == "exact"
    assert metadata["model"] == "Tiny"
    assert metadata["parameters"] == 123
    assert set(metadata["quantities"]) == {s.name for s in watched.scores}
    assert "created" in metadata


def test_measured_prior_and_range_are_in_the_metadata(tmp_path: Path) -> None:
    watched = monitor()
    fit(tmp_path, watched)
    assert watched.probes is not None
    config = json.loads((tmp_path / "leakwatch-run" / "run.json").read_text())["config"]
    assert config["prior_std"] == watched.probes.prior_std
    assert config["data_range"] == 1.0
    assert config["noise_std"] == 1e-4


def test_a_datamodule_gives_names_and_normalisation(tmp_path: Path) -> None:
    watched = monitor(log="all")
    run = trainer(tmp_path, watched)
    run.fit(Tiny(), datamodule=Data())
    assert watched.probes is not None
    assert watched.probes.class_names == ("ant", "bee", "cat")
    assert watched.probes.mean == (0.5,)
    assert watched.probes.std == (0.25,)
    assert "leakwatch-class/bee/i2f" in run.callback_metrics


def test_a_datamodule_s_unaugmented_samples_go_first(tmp_path: Path) -> None:
    class Augmented(Data):
        mean = std = None  # type: ignore[assignment]

        def setup(self, stage: str) -> None:
            self.probe_dataset = dataset()

        def train_dataloader(self) -> DataLoader[Any]:
            x, y = dataset().tensors
            return DataLoader(TensorDataset(x.flip(-1), y), batch_size=4)

    watched = monitor()
    trainer(tmp_path, watched).fit(Tiny(), datamodule=Augmented())
    assert watched.probes is not None
    plain = torch.stack([dataset()[i][0] for i in watched.probes.index])
    torch.testing.assert_close(watched.probes.x, plain, rtol=0, atol=0)


def test_a_subset_sampler_s_other_items_are_not_drawn(tmp_path: Path) -> None:
    kept = [1, 2, 3, 7, 11, 12, 13, 18]
    data = DataLoader(dataset(), batch_size=4, sampler=SubsetRandomSampler(kept))
    watched = monitor()
    fit(tmp_path, watched, data=data)
    assert watched.probes is not None
    assert set(watched.probes.index) <= set(kept)
    expected = torch.stack([dataset()[i][0] for i in watched.probes.index])
    torch.testing.assert_close(watched.probes.x, expected, rtol=0, atol=0)


def test_probes_of_one_s_own(tmp_path: Path) -> None:
    x, y = dataset().tensors
    probes = ProbeSet.from_tensors(x[:2], y[:2], index=[40, 7])
    watched = monitor(probes=probes)
    fit(tmp_path, watched, data=DataLoader(Stream(), batch_size=4))
    assert watched.probes is probes
    assert {r.sample for r in rows_of(watched)} == {40, 7, None}


def test_a_criterion_of_one_s_own(tmp_path: Path) -> None:
    class Pair(Tiny):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x.mean()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return criterion(self, *batch).mean()

    def criterion(module: Any, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(module(x)[0], y, reduction="none")

    watched = monitor(criterion=criterion)
    fit(tmp_path, watched, module=Pair())
    assert {r.status for r in rows_of(watched) if r.sample is not None} == {"ok"}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([dataset()[i] for i in range(8)])


class Odd(Dataset[Any]):
    """Items that a training step can take and a probe can't."""

    def __init__(self, item: Any) -> None:
        self.item = item

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return self.item


class Blind(Tiny):
    """Trains on whatever the loader gives."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        raise AssertionError("training began")


def nan_image() -> Tensor:
    x = torch.rand(1, 4, 4)
    x[0, 1, 2] = float("nan")
    return x


@pytest.mark.parametrize(
    ("data", "error", "text"),
    [
        (
            lambda: {"a": loader(), "b": loader()},
            TypeError,
            r"one training DataLoader, but found 2 .*pass probes=ProbeSet",
        ),
        (
            lambda: [loader(), loader()],
            TypeError,
            r"one training DataLoader, but found 2 .*pass probes=ProbeSet",
        ),
        (
            lambda: DataLoader(Stream()),
            TypeError,
            r"Stream is an IterableDataset; .*pass probes=ProbeSet",
        ),
        (
            lambda: [(torch.rand(2, 1, 4, 4), torch.tensor([0, 1]))],
            TypeError,
            r"one training DataLoader, but found|training data is a",
        ),
        (
            lambda: DataLoader(Odd((torch.zeros(1, 4, 4, dtype=torch.uint8), 0))),
            TypeError,
            r"probe images are torch.uint8 .*x.float\(\) / 255",
        ),
        (
            lambda: DataLoader(Odd((nan_image(), 0))),
            ValueError,
            r"contains 1 NaN and 0 infinite values",
        ),
        (
            lambda: DataLoader(Odd((torch.rand(1, 4, 4), 7))),
            ValueError,
            r"label 7 .*outside the network's classes: its 3 logits allow labels 0",
        ),
        (
            lambda: DataLoader(Odd((torch.rand(1, 4, 4), -1))),
            ValueError,
            r"label -1; expected class indices from 0",
        ),
        (
            lambda: DataLoader(Odd(torch.rand(1, 4, 4))),
            TypeError,
            r"is a Tensor; expected \(input, label\)",
        ),
    ],
)
def test_data_that_can_t_be_probed_is_refused_before_the_first_step(
    tmp_path: Path, data: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        fit(tmp_path, monitor(), module=Blind(), data=data())
    assert not (tmp_path / "leakwatch-run").exists()


def test_one_loader_in_a_dict_or_list_is_enough(tmp_path: Path) -> None:
    class Named(Tiny):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch["only"], batch_idx)

    watched = monitor()
    fit(tmp_path, watched, module=Named(), data={"only": loader()})
    assert len(moments_of(watched)) == 2


class ReturnsPair(Blind):
    def forward(self, x: Tensor) -> Any:
        return self.net(x), x


class Detached(Blind):
    """Random in eval mode: its gradient has no derivative to speak of."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x + torch.rand_like(x))
        return out


@pytest.mark.parametrize(
    ("module", "error", "text"),
    [
        (ReturnsPair, TypeError, r"tuple"),
        (Detached, RuntimeError, r"Detached"),
    ],
)
def test_a_module_that_can_t_be_probed_is_refused_before_the_first_step(
    tmp_path: Path, module: type[Blind], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        fit(tmp_path, monitor(), module=module())


def test_all_training_data_in_several_data_sets(tmp_path: Path) -> None:
    joined: ConcatDataset[Any] = ConcatDataset([dataset(12), dataset(12, seed=1)])
    watched = monitor(probes=24)
    fit(tmp_path, watched, data=DataLoader(joined, batch_size=6, shuffle=True))
    assert watched.probes is not None
    assert sorted(watched.probes.index) == list(range(24))


@pytest.mark.parametrize("kind", [LeakageMonitor, InversionAudit])
def test_data_that_can_t_be_probed_are_refused_by_the_callback_s_own_name(
    tmp_path: Path, kind: type[LeakageMonitor | InversionAudit]
) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__} draws its probes from one"):
        fit(tmp_path, kind(probes=3), module=Blind(), data=[loader(), loader()])
    said = rf"{kind.__name__} can't draw probes from the .*[^.]\. Correct"
    with pytest.raises(TypeError, match=said):
        fit(tmp_path, kind(probes=3), module=Blind(), data=DataLoader(Stream()))


def test_a_run_leaves_nothing_that_hides_a_package(tmp_path: Path) -> None:
    callbacks = [
        monitor(),
        monitor(name="train"),
        InversionAudit(3, samples=1, steps=2, restarts=1, report=False, verbose=False),
    ]
    fit(tmp_path, *callbacks)
    folders = sorted(p.name for p in tmp_path.iterdir() if p.is_dir())
    assert folders == ["leakwatch-audit", "leakwatch-run", "train-run"]
    assert (
        importlib.machinery.PathFinder.find_spec("leakwatch", [str(tmp_path)]) is None
    )


def test_inputs_whose_pixels_are_not_known_are_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(session, "say", lambda trainer, text: lines.append(text))
    x, y = dataset().tensors
    data = DataLoader(TensorDataset((x - 0.5) / 0.25, y), batch_size=4)
    said = []
    known: dict[str, float]
    for known in ({}, {"mean": 0.5, "std": 0.25}):
        where = str(tmp_path / str(len(said)))
        watched = monitor(verbose=True, directory=where, **known)
        fit(tmp_path, watched, data=data)
        beside = RiskLedger.open(str(watched.run_directory)).read_metadata()
        said.append(("\n".join(lines), str(beside.get("training"))))
        lines.clear()
    for text in said[0]:
        assert "inputs lie between -1.9" in text
        assert "give mean= and std= of the normalisation" in text
    for text in said[1]:
        assert "inputs lie" not in text


def test_mean_and_std_of_inputs_that_are_not_normalised_are_left_out(
    tmp_path: Path,
) -> None:
    """Where forward normalises, they would say of each pixel what it is not."""
    values = []
    for i, known in enumerate(({}, {"mean": 0.4, "std": 0.3})):
        watched = monitor(directory=str(tmp_path / str(i)), **known)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            fit(tmp_path, watched)
        told = [str(w.message) for w in seen if "are left out" in str(w.message)]
        assert len(told) == i
        rows = RiskLedger.open(str(watched.run_directory)).rows()
        values.append([row.value for row in rows if row.quantity.startswith("i2f")])
        assert len(values[i]) > 0
    assert values[0] == pytest.approx(values[1], rel=1e-12, nan_ok=True)


def test_warnings_say_of_which_callback_they_are(tmp_path: Path) -> None:
    class Summed(Tiny):
        def training_step(self, batch: Any, index: int) -> Tensor:
            total: Tensor = (self(batch[0]) ** 2).sum()
            return total

    both = [
        monitor(),
        InversionAudit(3, samples=1, steps=2, restarts=1, report=False, verbose=False),
    ]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit(tmp_path, *both, module=Summed())
    told = [
        str(w.message) for w in seen if "not that of the criterion" in str(w.message)
    ]
    assert sorted(text.split(":")[0] for text in told) == [
        "leakwatch",
        "leakwatch-audit",
    ]
