"""Every file in configs/ trains, at toy size, with the values that it states."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import wandb
import yaml
from PIL import Image
from torchvision.datasets import CIFAR10, CIFAR100

from leakwatch.cli import main
from leakwatch.cli.report import find_run
from leakwatch.datamodules import imagenette
from leakwatch.models import build_model
from leakwatch.reporting import RiskLedger, Row

CONFIGS = Path(__file__).parents[1] / "configs"
MONITOR = "trainer.callbacks.init_args"

# One epoch of two batches, one probe step after it.
TINY = [
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=2",
    "--trainer.limit_val_batches=1",
    "--trainer.num_sanity_val_steps=0",
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
    f"--{MONITOR}.every_n_epochs=1",
    f"--{MONITOR}.at_start=false",
]
TWO = [f"--{MONITOR}.probes=2"]
ONE = [f"--{MONITOR}.probes=1"]
# Attacks of a few steps, from random starts.
SHORT = [*TWO, f"--{MONITOR}.steps=3", f"--{MONITOR}.worst_case=null"]
SMALL = ["--data.init_args.batch_size=4"]
# Whole spectra of 32×32 colour pictures take a minute each.
LARGEST = [f"--{MONITOR}.scores=[lavp_l2_max]", f"--{MONITOR}.solver=lanczos"]
NARROW = [f"--model.init_args.model_args.{k}" for k in ("width=16", "depth=2")]
HALF_WIDTH = "--model.init_args.model_args.width=0.5"
# One pass of each client over few digits, on a network that takes no time.
FEDERATED = ["--model.init_args.model=linear", "--model.init_args.epochs=1"]
# One client, a few steps of the attack, and a few products.
WATCHED = [
    *FEDERATED,
    f"--{MONITOR}.clients=1",
    f"--{MONITOR}.steps=3",
    f"--{MONITOR}.products=5",
]
NO_WORKERS = ["--data.init_args.num_workers=0"]

#: File → configs before it and options after it. "toy": 8×8 pictures, MLP; "toy 32":
#: the same with 32×32.
CASES: dict[str, tuple[list[str], list[str]]] = {
    "quickstart.yaml": ([], [*TWO, "--data.init_args.subset=40", *SMALL]),
    # ResNet18 itself takes minutes at 32×32; model/resnet18.yaml covers it at 8×8.
    "cifar10_resnet18.yaml": (
        [],
        [*ONE, *LARGEST, *SMALL, "--model.init_args.model=resnet8"],
    ),
    "fashion_mnist_mlp.yaml": ([], [*TWO, *SMALL]),
    "federated_mnist.yaml": ([], [*ONE, *FEDERATED]),
    "federated_femnist.yaml": ([], [*ONE, *FEDERATED]),
    "federated_emnist.yaml": (
        ["federated_femnist.yaml"],
        [*ONE, *FEDERATED, "--data.init_args.clients=4"],
    ),
    "update_audit/sme.yaml": (["federated_mnist.yaml"], WATCHED),
    "update_audit/ig_update.yaml": (["federated_mnist.yaml"], WATCHED),
    "defense/gaussian.yaml": (["toy"], TWO),
    "defense/pruning.yaml": (["toy"], TWO),
    "defense/dp_sgd.yaml": (["toy"], TWO),
    "defense/mixup.yaml": (["toy"], TWO),
    "defense/eigen.yaml": (["toy"], TWO),
    "model/lenet.yaml": (["toy"], TWO),
    "model/lenet_relu.yaml": (["toy"], TWO),
    "model/mlp.yaml": (["toy"], TWO),
    "model/resnet8.yaml": (["toy"], TWO),
    "model/linear.yaml": (["toy"], TWO),
    "model/lenet_tanh.yaml": (["toy"], TWO),
    "model/mlp_sme.yaml": (["toy"], [*ONE, *LARGEST]),
    "model/sme_lenet.yaml": (["toy 32"], [*ONE, *LARGEST]),
    "model/sme_resnet8.yaml": (["toy"], [*ONE, *LARGEST]),
    "model/femnist_cnn.yaml": (["toy"], [*ONE, *LARGEST]),
    "model/cifar100_cnn.yaml": (["toy"], [*ONE, *LARGEST]),
    "model/sme_vit.yaml": (["toy"], [*ONE, *LARGEST, *NARROW]),
    "model/alexnet.yaml": (["toy 32"], [*ONE, *LARGEST]),
    "model/vgg9.yaml": (["toy"], [*ONE, *LARGEST]),
    "model/shufflenet_v2.yaml": (["toy"], [*ONE, *LARGEST, HALF_WIDTH]),
    # The two take a minute and gigabytes; their names and sizes are checked below.
    "model/resnet152.yaml": (["toy"], [*TWO, "--model.init_args.model=resnet8"]),
    "model/vit_b_16.yaml": (["toy"], [*TWO, "--model.init_args.model=linear"]),
    "model/resnet18.yaml": (["toy", "monitor/fast_lanczos.yaml"], [*ONE, *LARGEST]),
    "data/mnist_sample.yaml": (["toy"], [*TWO, *LARGEST, *SMALL]),
    "data/mnist.yaml": (["toy"], [*TWO, *LARGEST, *SMALL]),
    "data/fashion_mnist.yaml": (["toy"], [*TWO, *LARGEST, *SMALL]),
    "data/cifar10.yaml": (["toy"], [*TWO, *LARGEST, *SMALL]),
    "data/arrays.yaml": (["toy"], [*TWO, *LARGEST, *SMALL]),
    "data/cifar100.yaml": (["toy"], [*TWO, *LARGEST, *SMALL]),
    "data/imagenette.yaml": (["toy"], [*TWO, *LARGEST, *SMALL]),
    "data/imagewoof.yaml": (["toy"], [*TWO, *LARGEST, *SMALL]),
    # With more each step moves sums over 150,000 inputs so far that all units saturate.
    "data/imagenet.yaml": (
        ["toy"],
        [*TWO, *LARGEST, *SMALL, *NO_WORKERS, "--model.init_args.lr=1e-6"],
    ),
    "data/image_folder.yaml": (["toy"], [*TWO, *LARGEST, *SMALL]),
    "data/femnist.yaml": (["toy"], [*TWO, *LARGEST, *SMALL]),
    "data/emnist.yaml": (["toy"], [*TWO, *LARGEST, *SMALL]),
    "monitor/default.yaml": (["toy"], TWO),
    "monitor/exact_float64.yaml": (["toy"], TWO),
    "monitor/fast_lanczos.yaml": (["toy"], TWO),
    "monitor/papers_power.yaml": (["toy"], TWO),
    "attack/inverting_gradients.yaml": (["toy"], SHORT),
    "attack/dlg.yaml": (["toy"], SHORT),
    "attack/idlg.yaml": (["toy"], SHORT),
    # Its prior needs BatchNorm.
    "attack/gradinversion_bn.yaml": (["toy", "model/resnet8.yaml"], SHORT),
    "attack/lavp_l2.yaml": (["toy"], SHORT),
    "attack/lavp_cosine.yaml": (["toy"], SHORT),
    "attack/gauss_newton.yaml": (["toy"], SHORT),
    "attack/combined.yaml": (["toy"], SHORT),
    "attack/ci_net.yaml": (["toy"], SHORT),
    "logger/csv.yaml": (["toy"], TWO),
    "logger/wandb_offline.yaml": (["toy"], TWO),
    "logger/wandb_online.yaml": (["toy"], TWO),
    "trainer/default.yaml": (["toy"], TWO),
}

#: Configs of other commands than ``fit``; their tests are in cli/ and reproduction/.
OTHERS = {"compare_inits.yaml", "trade_off.yaml"} | {
    str(path.relative_to(CONFIGS)) for path in CONFIGS.glob("experiments/*.yaml")
}

pytestmark = pytest.mark.filterwarnings(
    # What Lightning says about tiny runs: few batches, few workers.
    "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"
)


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    # No test reaches a server; loggers that ask for one are put off.
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield
    wandb.finish()
    # W&B's process reads relative paths from where it was started, and version 0.23.1
    # ends where they lead nowhere.
    wandb.teardown()


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    """A run that takes a second: 100 pictures of 8×8 in 10 classes."""
    write_arrays(tmp_path / "toy.npz", side=8)
    path = tmp_path / "toy.yaml"
    sizes = {"model": "mlp", "image_size": 8, "model_args": {"hidden_sizes": [4]}}
    monitor = {"class_path": "leakwatch.callbacks.LeakageMonitor"}
    config = {
        "model": {"init_args": sizes},
        "data": {
            "class_path": "leakwatch.datamodules.ArrayDataModule",
            "init_args": {"path": str(tmp_path / "toy.npz"), "batch_size": 4},
        },
        "trainer": {"logger": False, "callbacks": [monitor]},
    }
    path.write_text(yaml.safe_dump(config))
    return path


def write_arrays(path: Path, side: int) -> None:
    path.parent.mkdir(exist_ok=True)
    images = np.random.default_rng(0).integers(0, 256, (100, side, side), np.uint8)
    np.savez(path, train_images=images, train_labels=np.arange(100) % 10)


def write_idx(path: Path, array: np.ndarray[Any, Any]) -> None:
    sizes = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    path.write_bytes(sizes + array.tobytes())


def write_files(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny data sets in the true formats, where the configs look for them."""
    generator = np.random.default_rng(0)
    labels = np.arange(100, dtype=np.uint8) % 10
    write_arrays(root / "images.npz", side=28)
    for name in ("MNIST", "FashionMNIST"):
        raw = root / name / "raw"
        raw.mkdir(parents=True)
        for part in ("train", "t10k"):
            images = generator.integers(0, 256, (100, 28, 28), np.uint8)
            write_idx(raw / f"{part}-images-idx3-ubyte", images)
            write_idx(raw / f"{part}-labels-idx1-ubyte", labels)
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    sums: dict[str, str] = {}

    def dump(name: str, content: object) -> None:
        data = pickle.dumps(content)
        (folder / name).write_bytes(data)
        sums[name] = hashlib.md5(data, usedforsecurity=False).hexdigest()

    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    for name in names:
        images = generator.integers(0, 256, (100, 3072), np.uint8)
        dump(name, {"data": images, "labels": labels.tolist()})
    dump("batches.meta", {"label_names": ["x"] * 10})
    monkeypatch.setattr(CIFAR10, "train_list", [[n, sums[n]] for n in names[:5]])
    monkeypatch.setattr(CIFAR10, "test_list", [[names[5], sums[names[5]]]])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": sums["batches.meta"]})


def write_named(root: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data sets that only one config wants."""
    generator = np.random.default_rng(0)
    kind = Path(name).stem.removeprefix("federated_")

    def write_folders(folder: Path, classes: Sequence[str], n: int) -> None:
        for label in classes:
            (folder / label).mkdir(parents=True)
            for i in range(n):
                picture = generator.integers(0, 256, (40, 48, 3), np.uint8)
                Image.fromarray(picture).save(folder / label / f"{i}.JPEG")

    if kind in ("imagenette", "imagewoof"):
        ids = {"imagenette": imagenette._NETTE, "imagewoof": imagenette._WOOF}[kind]
        write_folders(root / f"{kind}2-160" / "train", tuple(ids), 2)
        write_folders(root / f"{kind}2-160" / "val", tuple(ids), 1)
    elif kind == "imagenet":
        for split in ("train", "val"):
            write_folders(root / "imagenet" / split, ("n01440764", "n01443537"), 6)
    elif kind == "image_folder":
        write_folders(root / "images", [f"class {i}" for i in range(10)], 6)
    elif kind == "femnist":
        pixels = (generator.integers(0, 256, (62, 784)) / 255).tolist()
        data = {"x": pixels, "y": list(range(62))}
        users = {f"f{i:04d}_00": data for i in range(10)}
        content = {"users": list(users), "num_samples": [62] * 10, "user_data": users}
        (root / "femnist" / "train").mkdir(parents=True)
        (root / "femnist" / "train" / "all_data_0.json").write_text(json.dumps(content))
    elif kind == "emnist":
        raw = root / "EMNIST" / "raw"
        raw.mkdir(parents=True)
        for part in ("train", "test"):
            images = generator.integers(0, 256, (620, 28, 28), np.uint8)
            names = np.arange(620, dtype=np.uint8) % 62
            write_idx(raw / f"emnist-byclass-{part}-images-idx3-ubyte", images)
            write_idx(raw / f"emnist-byclass-{part}-labels-idx1-ubyte", names)
    elif kind == "cifar100":
        folder = root / "cifar-100-python"
        folder.mkdir()
        sums = {}
        labels = [i % 100 for i in range(1000)]
        pictures = generator.integers(0, 256, (1000, 3072), np.uint8)
        for file, stored in (
            ("train", {"data": pictures, "fine_labels": labels}),
            ("test", {"data": pictures[:100], "fine_labels": labels[:100]}),
            ("meta", {"fine_label_names": [str(i) for i in range(100)]}),
        ):
            packed = pickle.dumps(stored)
            (folder / file).write_bytes(packed)
            sums[file] = hashlib.md5(packed, usedforsecurity=False).hexdigest()
        monkeypatch.setattr(CIFAR100, "train_list", [["train", sums["train"]]])
        monkeypatch.setattr(CIFAR100, "test_list", [["test", sums["test"]]])
        monkeypatch.setattr(CIFAR100, "meta", {**CIFAR100.meta, "md5": sums["meta"]})


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """Dotted path → value of everything that a config states."""
    if isinstance(value, dict) and value:
        pairs = [(f"{path}.{key}".strip("."), item) for key, item in value.items()]
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        pairs = [(f"{path}.{i}", item) for i, item in enumerate(value)]
    else:
        return {path: value}
    return {k: v for key, item in pairs for k, v in leaves(item, key).items()}


def test_every_file_has_a_case() -> None:
    files = {
        str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*") if path.is_file()
    }
    assert files == CASES.keys() | OTHERS


@pytest.mark.parametrize("name", CASES)
def test_config_trains_with_its_values(
    name: str,
    toy: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_files(Path("data"), monkeypatch)
    write_named(Path("data"), name, monkeypatch)
    before, after = CASES[name]
    side = 32 if "toy 32" in before else 8
    if side > 8:
        write_arrays(toy.with_suffix(".npz"), side)
    paths = [toy if part.startswith("toy") else CONFIGS / part for part in before]
    if name.startswith("model/"):
        after = [*after, f"--model.init_args.image_size={side}"]
    configs = [f"--config={path}" for path in (*paths, CONFIGS / name)]
    # An update exists only after a round.
    never = f"--{MONITOR}.at_start" if name.startswith("update_audit/") else "never"
    tiny = [option for option in TINY if not option.startswith(never)]
    assert main(["fit", *configs, *tiny, *after]) == 0

    run = find_run(".")
    assert f"report: {run / 'report.html'}" in capsys.readouterr().out.replace(
        str(Path.cwd()), "."
    ).replace("./", "")
    check_values(run)
    stated = leaves(yaml.safe_load((CONFIGS / name).read_text()))
    used = leaves(yaml.safe_load((run / "config.yaml").read_text()))
    changed = {
        option.lstrip("-").split("=")[0].removeprefix("trainer.callbacks.init_args.")
        for option in (*tiny, *after)
    }
    kept = {
        path: value
        for path, value in stated.items()
        if path not in changed and path.rpartition(".")[2] not in changed
    }
    assert len(kept) > 0
    assert {path: used.get(path) for path in kept} == kept


@pytest.mark.parametrize("name", [name for name in CASES if name[:6] == "model/"])
def test_model_config_names_an_architecture(name: str) -> None:
    stated = yaml.safe_load((CONFIGS / name).read_text())["model"]["init_args"]
    with torch.device("meta"):
        net = build_model(
            stated["model"],
            in_channels=3,
            num_classes=10,
            image_size=32,
            model_args=stated["model_args"],
        )
    assert sum(p.numel() for p in net.parameters()) > 0


def check_values(run: Path) -> None:
    rows: list[Row] = [r for r in RiskLedger.open(run).rows() if r.sample is not None]
    assert {row.epoch for row in rows} == {1}
    asked = {"grad_norm", "loss"}
    assert {row.quantity for row in rows} > asked
    scores = [row for row in rows if row.quantity not in asked]
    assert any(row.usable for row in scores)
    assert not [row for row in rows if row.status.startswith("failed")]


def test_configs_in_comments_exist() -> None:
    named: set[str] = set()
    for path in CONFIGS.rglob("*.yaml"):
        found = [
            f"{name}.yaml"
            for name in re.findall(r"--config leakwatch:([\w/]+)", path.read_text())
        ] + [
            f"experiments/{name}.yaml"
            for name in re.findall(r"leakwatch reproduce ([\w-]+)", path.read_text())
        ]
        assert str(path.relative_to(CONFIGS)) in found
        named.update(found)
    assert named <= CASES.keys() | OTHERS


def test_quickstart_never_uploads() -> None:
    loggers = yaml.safe_load((CONFIGS / "quickstart.yaml").read_text())["trainer"][
        "logger"
    ]
    online = [
        str(path.relative_to(CONFIGS))
        for path in CONFIGS.rglob("*.yaml")
        if "WandbLogger" in path.read_text() and "offline: true" not in path.read_text()
    ]
    assert [entry["class_path"].rpartition(".")[2] for entry in loggers] == [
        "CSVLogger",
        "WandbLogger",
    ]
    assert online == ["logger/wandb_online.yaml"]
