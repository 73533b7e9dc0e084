"""UpdateAudit with attacks whose results are known beforehand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

import leakwatch.callbacks._audit.updates as auditing
from leakwatch import Status, WeightUpdate
from leakwatch.attacks import PixelScale, Start, UpdateReconstruction
from leakwatch.callbacks import UpdateAudit
from leakwatch.datamodules import ArrayDataModule, ClientsDataModule
from leakwatch.derivatives import GradientMap
from leakwatch.federated import client_updates
from leakwatch.models import FedAvgModule
from leakwatch.reporting import RiskLedger, Row
from leakwatch.scores import score_update
from leakwatch.status import OK

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning",
    "ignore:Checkpoint directory .* exists and is not empty:UserWarning",
    "ignore:The dirpath has changed:UserWarning",
    "ignore:Be aware that when using `ckpt_path`:UserWarning",
)

CLIENTS, EACH = 5, 4


@dataclass
class Known:
    """Returns a client's true samples in another order, plus a known error.

    Attributes:
        samples: client → its samples; filled from the module's round.
        status: of every client.
        raises: instead of a result.
    """

    samples: Callable[[int], Tensor]
    status: Status = OK
    raises: Exception | None = None
    name: str = "known"
    seen: list[tuple[WeightUpdate, dict[str, Any]]] = field(default_factory=list)

    def run(
        self,
        gradients: GradientMap,
        update: WeightUpdate,
        *,
        pixels: PixelScale,
        start: Start,
        **options: Any,
    ) -> UpdateReconstruction:
        self.seen.append((update, options))
        torch.rand(3)  # an attack may draw from the global stream
        if self.raises is not None:
            raise self.raises
        assert update.index is not None
        images = torch.stack([self.samples(c) for c in update.index]).flip(1)
        n = images.shape[1]
        images = images + error_of(torch.arange(n).flip(0)).view(1, -1, 1, 1, 1)
        c = len(images)
        zeros = torch.zeros(c, dtype=torch.float64)
        return UpdateReconstruction(
            images=images,
            labels=torch.zeros(c, n, dtype=torch.long),
            loss=zeros + 0.25,
            alpha=zeros + 0.4,
            status=(self.status,) * c,
            restart_images=images[None],
            restart_loss=zeros[None],
            restart_alpha=zeros[None],
            iterations=3,
            seconds=1.0,
            attack=self.name,
            history=torch.zeros(1, 1, c),
        )


def error_of(i: Tensor) -> Tensor:
    """What is added to every pixel of a client's i-th sample."""
    return 0.01 * (1 + i)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3),
        nn.Sigmoid(),
        nn.Dropout(0.2),
        nn.Flatten(),
        nn.Linear(32, 3),
    )


def module(**changes: Any) -> FedAvgModule:
    local = {"epochs": 2, "batch_size": 2, "lr": 0.1, "num_classes": 3, **changes}
    return FedAvgModule(network(), **local)


@pytest.fixture(scope="module")
def arrays(tmp_path_factory: pytest.TempPathFactory) -> str:
    generator = np.random.default_rng(0)
    # Away from 0 and 1, where a reconstruction would be clipped.
    images = generator.integers(64, 192, (40, 6, 6), np.uint8)
    path = tmp_path_factory.mktemp("data") / "images.npz"
    np.savez(path, train_images=images, train_labels=np.arange(40) % 3)
    return str(path)


def clients(path: str, **changes: Any) -> ClientsDataModule:
    split = {"clients": CLIENTS, "per_client": EACH, **changes}
    return ClientsDataModule(ArrayDataModule(path, batch_size=8), "fixed", **split)


def fit(
    root: Path,
    data: L.LightningDataModule,
    *callbacks: Callback,
    rounds: int = 1,
    net: L.LightningModule | None = None,
    logger: Any = False,
    checkpoint: str | None = None,
) -> L.LightningModule:
    net = module() if net is None else net
    trainer = L.Trainer(
        default_root_dir=root,
        max_epochs=rounds,
        accelerator="cpu",
        logger=logger,
        callbacks=list(callbacks),
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
        log_every_n_steps=1,
    )
    trainer.fit(net, data, ckpt_path=checkpoint)
    return net


def audit(data: ClientsDataModule, **changes: Any) -> tuple[UpdateAudit, Known]:
    attack = changes.pop("attack", None) or Known(lambda c: data.clients[c][0])
    given: dict[str, Any] = {
        "clients": [1, 3],
        "scores": ["lavp_l2_max"],
        "blocks": False,
        "products": 30,
        "report": False,
        "verbose": False,
        "dtype": "float64",
        "metrics": ["mse", "psnr"],
    }
    return UpdateAudit(attack=attack, **(given | changes)), attack


def rows_of(watched: UpdateAudit) -> list[Row]:
    assert watched.run_directory is not None
    return RiskLedger.open(watched.run_directory).rows()


def find(rows: list[Row], quantity: str) -> dict[int | None, Row]:
    return {r.sample: r for r in rows if r.quantity == quantity}


def test_quality_is_that_of_each_sample_after_assignment(
    tmp_path: Path, arrays: str
) -> None:
    data = clients(arrays)
    watched, attack = audit(data)
    fit(tmp_path, data, watched)
    rows = rows_of(watched)
    assert data.train_dataset is not None
    parts = data.train_dataset.parts
    psnr = find(rows, "audit/random/psnr")
    assert set(psnr) == {*parts[1].tolist(), *parts[3].tolist()}
    mean = data.mean, data.std
    scale = 1.0 if mean[1] is None else float(mean[1][0])
    for part in (parts[1], parts[3]):
        for i, sample in enumerate(part.tolist()):
            error = float(error_of(torch.tensor(i))) * scale
            row = psnr[sample]
            assert row.value == pytest.approx(-20 * math.log10(error), abs=1e-3)
            assert row.status == "ok"
            assert row.label == int(data.train_dataset.targets[sample])
    expected = {"alpha": 0.4, "loss": 0.25, "seconds": 0.5}
    for name, value in expected.items():
        for client in (1, 3):
            row = find(rows, f"update/client-{client}/{name}")[None]
            assert (row.value, row.status) == (value, "ok")
    mean_psnr = np.mean([psnr[s].value for s in parts[1].tolist()])
    found = find(rows, "update/client-1/psnr")[None].value
    assert found == pytest.approx(float(mean_psnr), abs=1e-4)
    assert find(rows, "audit/random/recovered")[None].value == 1.0
    assert {r.value for r in find(rows, "audit/random/match").values()} == {0.25}
    update, options = attack.seen[0]
    assert update.index == (1, 3)
    assert update.training == module().training_settings
    assert options["restarts"] == 1


def test_scores_are_those_of_the_update_that_was_sent(
    tmp_path: Path, arrays: str
) -> None:
    data = clients(arrays)
    watched, _ = audit(
        data,
        scores=["lavp_l2_max", "i2f_bayes"],
        prior_std=0.3,
        blocks=True,
        products=150,
    )
    net = fit(tmp_path, data, watched)
    assert isinstance(net, FedAvgModule)
    assert net.last_round is not None
    sent = [u for u in net.last_round.updates if u.client in (1, 3)]
    assert watched.probes is not None
    expected = score_update(
        net.model,
        torch.stack([u.x for u in sent]).double(),
        torch.stack([u.y for u in sent]),
        client_updates(sent)[0],
        ["lavp_l2_max", "i2f_bayes"],
        prior_std=0.3,
        prior_mean=watched.probes.prior_mean,
        mean=data.mean,
        std=data.std,
        dtype=torch.float64,
    )
    rows = rows_of(watched)
    assert data.train_dataset is not None
    for row, client in enumerate((1, 3)):
        samples = data.train_dataset.parts[client].tolist()
        for name in expected:
            found = find(rows, name)
            values = torch.tensor([found[s].value for s in samples])
            torch.testing.assert_close(
                values.double(), expected[name][row], rtol=1e-5, atol=0.0
            )
        for name in ("alpha", "similarity", "mismatch"):
            value = find(rows, f"update/client-{client}/surrogate_{name}")[None].value
            assert value == pytest.approx(float(getattr(expected, name)[row]), rel=1e-5)
    rho = find(rows, "audit/spearman/joint_i2f_bayes/random/psnr")[None]
    assert rho.status.startswith("estimated")


def test_training_is_left_alone(tmp_path: Path, arrays: str) -> None:
    """Dropout draws from a stream, an attack disturbs the global one."""
    plain = fit(tmp_path / "a", clients(arrays), rounds=3)
    data = clients(arrays)
    watched, attack = audit(data)
    seen = fit(tmp_path / "b", data, watched, rounds=3)
    assert len(attack.seen) == 3
    pairs = zip(plain.state_dict().items(), seen.state_dict().items(), strict=True)
    for (name, a), (other, b) in pairs:
        assert name == other
        assert torch.equal(a, b)


def test_only_clients_that_answered_in_audited_rounds(
    tmp_path: Path, arrays: str
) -> None:
    data = clients(arrays, share=0.4)
    watched, attack = audit(data, clients=list(range(CLIENTS)), every_n_epochs=2)
    answered: dict[int, list[int]] = {}

    class Watch(Callback):
        def on_train_batch_end(self, _: Any, net: Any, *__: Any) -> None:
            answered[net.last_round.number + 1] = [
                u.client for u in net.last_round.updates
            ]

    fit(tmp_path, data, watched, Watch(), rounds=4)
    rows = rows_of(watched)
    assert {r.epoch for r in rows} == {2, 4}
    assert data.train_dataset is not None
    for number in (2, 4):
        there = {s for r in rows if r.epoch == number and (s := r.sample) is not None}
        parts = [data.train_dataset.parts[c].tolist() for c in answered[number]]
        assert there == {s for part in parts for s in part}
    assert [len(u.index or ()) for u, _ in attack.seen] == [2, 2]


def test_clients_of_different_size(tmp_path: Path, arrays: str) -> None:
    """Attacked apart, recorded together."""
    data = ClientsDataModule(
        ArrayDataModule(arrays, batch_size=8), "dirichlet", clients=3, alpha=0.3
    )
    watched, attack = audit(data, clients=3)
    fit(tmp_path, data, watched)
    assert watched.watched == (0, 1, 2)
    sizes = {u.samples for u, _ in attack.seen}
    assert len(sizes) > 1
    psnr = find(rows_of(watched), "audit/random/psnr")
    assert len(psnr) == sum(u.samples * u.clients for u, _ in attack.seen)
    kept = RiskLedger.open(watched.run_directory or "").attacks()[0]
    assert watched.probes is not None
    assert kept["sample"].tolist() == list(watched.probes.index)
    assert kept["original"].shape == kept["random"].shape
    # The probes come from the data set, the originals from what the clients held.
    images = (255 * watched.probes.pixels()[:, 0]).round().numpy()
    assert np.array_equal(kept["original"][..., 0], images)
    assert float(np.abs(kept["random"][..., 0] - images).max()) < 64


def test_an_attack_that_fails_keeps_scores_and_training(
    tmp_path: Path, arrays: str
) -> None:
    data = clients(arrays)
    attack = Known(lambda c: data.clients[c][0], raises=RuntimeError("no luck"))
    watched, _ = audit(data, attack=attack)
    with pytest.warns(UserWarning, match="values failed"):
        net = fit(tmp_path, data, watched)
    rows = rows_of(watched)
    for name in ("psnr", "verdict", "match"):
        found = find(rows, f"audit/random/{name}").values()
        assert len(found) == 2 * EACH
        assert all("RuntimeError: no luck" in r.status for r in found)
    predicted = find(rows, "joint_i2f_bayes").values()
    assert [r.status for r in predicted] == ["ok"] * 2 * EACH
    assert int(net.trainer.global_step) == 1


def test_scores_that_fail_keep_the_attack(
    tmp_path: Path, arrays: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ArithmeticError("no score")

    monkeypatch.setattr(auditing, "evaluate_update", broken)
    data = clients(arrays)
    watched, _ = audit(data, blocks=True)
    with pytest.warns(UserWarning, match="values failed"):
        fit(tmp_path, data, watched)
    rows = rows_of(watched)
    for name in ("lavp_l2_max", "joint_i2f_bayes_psnr"):
        found = find(rows, name).values()
        assert len(found) == 2 * EACH
        assert {r.status.split(" (")[0] for r in found} == {
            "failed: ArithmeticError: no score"
        }
    assert all(r.status == "ok" for r in find(rows, "audit/random/psnr").values())


def test_an_attack_that_did_not_match_is_inconclusive(
    tmp_path: Path, arrays: str
) -> None:
    data = clients(arrays)

    def noise(client: int) -> Tensor:
        return torch.full_like(data.clients[client][0], 0.9)

    attack = Known(noise, status=Status("not converged", "too few steps"))
    watched, _ = audit(data, attack=attack)
    fit(tmp_path, data, watched)
    rows = rows_of(watched)
    verdicts = find(rows, "audit/random/verdict").values()
    assert all(r.status == "not converged: too few steps" for r in verdicts)
    recovered = find(rows, "audit/random/recovered")[None]
    assert recovered.status.startswith("undefined")
    mean = find(rows, "update/client-1/psnr")[None]
    assert math.isnan(mean.value)
    assert mean.status == ("undefined: no attack was conclusive, which shows no safety")


def test_a_client_is_judged_by_its_conclusive_samples(
    tmp_path: Path, arrays: str
) -> None:
    data = clients(arrays)

    def one(client: int) -> Tensor:
        x = data.clients[client][0]
        return torch.cat([x[:1], torch.full_like(x[1:], 0.9)])

    # A picture that shows the sample counts, whatever the attack says of itself.
    attack = Known(one, status=Status("not converged", "too few steps"))
    watched, _ = audit(data, attack=attack, report=True)
    fit(tmp_path, data, watched)
    rows = rows_of(watched)
    known = [r for r in find(rows, "audit/random/psnr").values() if r.usable]
    assert len(known) == 2
    mean = find(rows, "update/client-1/psnr")[None]
    assert mean.value == pytest.approx(known[0].value)
    assert mean.status.startswith("estimated: of 1 of 4 samples")
    assert watched.run_directory is not None
    metadata = RiskLedger.open(watched.run_directory).read_metadata()
    assert metadata["message"] == "update"
    meanings = [q["meaning"] for q in metadata["quantities"].values()]
    shared = [text for text in meanings if "gradient was matched" in text]
    assert not shared
    page = (Path(watched.run_directory) / "report.html").read_text()
    assert "Weight-update leakage of Sequential" in page
    assert "median PSNR of 2 samples, 6 more inconclusive" in page


def test_resumed_equals_uninterrupted(tmp_path: Path, arrays: str) -> None:
    def run(root: Path, rounds: int, checkpoint: str | None = None) -> UpdateAudit:
        data = clients(arrays, share=0.6)
        watched, _ = audit(data, clients=4, directory=str(root / "record"))
        saver = ModelCheckpoint(root, save_last=True, filename="round")
        fit(root, data, watched, saver, rounds=rounds, checkpoint=checkpoint)
        return watched

    whole = run(tmp_path / "whole", 3)
    first = run(tmp_path / "parts", 2)
    second = run(tmp_path / "parts", 3, str(tmp_path / "parts" / "last.ckpt"))
    assert first.watched == second.watched == whole.watched
    timed = ("seconds", "time_fraction")
    kept = [
        [
            (r.epoch, r.step, r.sample, r.quantity, r.value, r.status)
            for r in rows_of(watched)
            if r.quantity not in timed
        ]
        for watched in (whole, second)
    ]
    assert {r[0] for r in kept[0]} == {1, 2, 3}
    assert repr(kept[0]) == repr(kept[1])


def test_scalars_reach_the_logger_and_pictures_stay(
    tmp_path: Path, arrays: str
) -> None:
    data = clients(arrays)
    watched, _ = audit(data, report=True, log="all")
    fit(tmp_path, data, watched, logger=CSVLogger(tmp_path))
    written = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text()
    header = written.splitlines()[0].split(",")
    for key in (
        "leakwatch-update/audit/random/psnr/median",
        "leakwatch-update/audit/random/psnr/worst",
        "leakwatch-update-detail/update/client-1/alpha",
        "leakwatch-update-detail/update/client-3/psnr",
        "leakwatch-update/psnr/median",
        "leakwatch-update-detail/joint_i2f_bayes_psnr/median",
        "leakwatch-update-detail/audit/spearman/joint_i2f_bayes/random/psnr",
        "leakwatch-update/seconds",
    ):
        assert key in header
    assert watched.run_directory is not None
    page = (Path(watched.run_directory) / "report.html").read_text()
    assert "joint_i2f_bayes" in page
    metadata = RiskLedger.open(watched.run_directory).read_metadata()
    assert metadata["config"]["clients"] == [1, 3]
    known = metadata["quantities"]
    recorded = {r.quantity for r in rows_of(watched)}
    plain = {q for q in recorded if not q.startswith("audit/spearman/")}
    derived = {"seconds", "time_fraction"}
    derived |= {"audit/random/conclusive", "audit/random/recovered"}
    assert plain - derived <= set(known)


def test_clients_are_drawn_by_the_seed(tmp_path: Path, arrays: str) -> None:
    drawn = set()
    for seed in (0, 0, 1, 2):
        data = clients(arrays)
        watched, _ = audit(data, clients=2, seed=seed)
        fit(tmp_path / str(len(drawn)), data, watched)
        drawn.add((seed, watched.watched))
    assert len(drawn) == 3
    assert len({numbers for _, numbers in drawn}) > 1


class Plain(L.LightningModule):
    """Keeps no rounds."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(36, 3))

    def training_step(self, batch: Any, _: int) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, _: int) -> None:
        """Lightning warns without one."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_module_without_rounds_is_refused(tmp_path: Path, arrays: str) -> None:
    data = clients(arrays)
    with pytest.raises(TypeError, match="Plain keeps no last_round"):
        fit(tmp_path, data, audit(data)[0], net=Plain())


def test_data_without_clients_are_refused(tmp_path: Path, arrays: str) -> None:
    data = ArrayDataModule(arrays, batch_size=8)
    with pytest.raises(TypeError, match="has no parts; wrap it"):
        fit(tmp_path, data, UpdateAudit(clients=1))


@pytest.mark.parametrize(
    ("chosen", "text"), [(9, "only 5 with samples"), ([0, 7], r"\[7\] that have no")]
)
def test_clients_that_there_are_not(
    tmp_path: Path, arrays: str, chosen: Any, text: str
) -> None:
    data = clients(arrays)
    with pytest.raises(ValueError, match=text):
        fit(tmp_path, data, audit(data, clients=chosen)[0])


@pytest.mark.parametrize(
    ("given", "kind", "text"),
    [
        ({"clients": 0}, ValueError, "clients must be at least 1"),
        ({"clients": "all"}, TypeError, "clients must be how many"),
        ({"clients": [1, 1]}, ValueError, "each once"),
        ({"clients": []}, ValueError, "at least one client"),
        ({"clients": [0.5]}, TypeError, "must be an integer"),
        ({"attack": "dlg"}, ValueError, "unknown attack on updates 'dlg'"),
        ({"attack": 3}, TypeError, "attack must be the name"),
        ({"steps": 0}, ValueError, "steps must be at least 1"),
        (
            {"attack": Known(lambda c: torch.zeros(1)), "steps": 3},
            ValueError,
            "for pres",
        ),
        ({"every_n_epochs": 0}, ValueError, "every_n_epochs must be at least 1"),
        ({"blocks": False, "joint": False}, ValueError, "both False"),
        ({"labels": "yes"}, TypeError, "labels must be True or False"),
        ({"scores": ["i3f"]}, ValueError, "i3f"),
        ({"metrics": ["snr"]}, ValueError, "snr"),
        ({"time_limit": -1.0}, ValueError, "time_limit must be positive"),
        ({"noise_std": 0.0}, ValueError, "noise_std must be positive"),
    ],
)
def test_wrong_arguments(
    given: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        UpdateAudit(**given)


def test_the_published_attack_runs(tmp_path: Path, arrays: str) -> None:
    data = clients(arrays)
    watched = UpdateAudit(clients=[2], steps=5, scores=["lavp_l2_max"], verbose=True)
    fit(tmp_path, data, watched)
    rows = rows_of(watched)
    psnr = find(rows, "audit/random/psnr").values()
    assert len(psnr) == EACH
    assert all(math.isfinite(r.value) for r in psnr)
    sentence = watched.sentence(rows)
    assert sentence is not None
    assert "no attack on 4 samples was conclusive" in sentence


def test_what_one_gradient_does_not_explain_is_not_blamed_on_the_attack() -> None:
    failed = Status("not converged", "94 % was not matched; it needs more steps.")
    assert auditing.judged(failed, 0.999) is failed  # the true samples leave 4 %
    assert auditing.judged(failed, math.nan) is failed
    assert auditing.judged(OK, 0.5) is OK
    said = auditing.judged(failed, 0.5)
    assert said.word == "not converged"
    assert "the true samples themselves leave 100 % of it" in said.reason
    assert "more steps don't help" in said.reason
