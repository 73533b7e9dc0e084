"""The package as others see it: names, wheel, layers."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

PUBLIC = {
    "leakwatch": [
        "GradientJacobian",
        "GradientMap",
        "LayerTable",
        "LocalTraining",
        "ProbeSet",
        "Reconstruction",
        "ScoreResult",
        "Status",
        "UnsupportedModuleError",
        "UpdateReconstruction",
        "UpdateScores",
        "WeightUpdate",
        "__version__",
        "attack",
        "attack_update",
        "compare_initializations",
        "cross_entropy",
        "layer_attribution",
        "recommend_noise",
        "score",
        "score_update",
        "trade_off",
        "unfairness",
    ],
    "leakwatch.callbacks": [
        "GateError",
        "GradientDefense",
        "InversionAudit",
        "LeakageGate",
        "LeakageMonitor",
        "UpdateAudit",
        "observing",
    ],
    "leakwatch.datamodules": [
        "ArrayDataModule",
        "CIFAR100DataModule",
        "CIFAR10DataModule",
        "ClientDataset",
        "ClientsDataModule",
        "EMNISTDataModule",
        "FEMNISTDataModule",
        "FashionMNISTDataModule",
        "ImageArrays",
        "ImageDataModule",
        "ImageDataset",
        "ImageFileDataset",
        "ImageFiles",
        "ImageFolderDataModule",
        "ImageNetDataModule",
        "ImageNetteDataModule",
        "ImageWoofDataModule",
        "MNISTDataModule",
        "MNISTSample",
        "RoundSampler",
        "Splits",
    ],
    "leakwatch.defenses": [
        "Allocation",
        "Basis",
        "Budget",
        "Chain",
        "Coefficients",
        "Covariance",
        "DPSGD",
        "Defense",
        "Deflation",
        "Diagonal",
        "EigenNoise",
        "GaussianNoise",
        "GradientPruning",
        "InRange",
        "InputSpace",
        "Isotropic",
        "Knowledge",
        "LinearMap",
        "MixUp",
        "Mixing",
        "Needs",
        "Observation",
        "PredictedErrors",
        "PrivacyLoss",
        "Proportional",
        "PruningToBudget",
        "Reduction",
        "RowNorms",
        "Samples",
        "Scaling",
        "Selection",
        "Shared",
        "ShippedDefense",
        "Single",
        "Smallest",
        "Waterfill",
        "averaged",
        "dp_sgd",
        "energy_in_range",
        "energy_share",
        "expected_norm",
        "mapped",
        "observed",
        "perturbation",
        "predicted_errors",
        "privacy_loss",
        "register_defense",
        "registered_defenses",
        "row_norms",
    ],
    "leakwatch.federated": [
        "Answering",
        "Buffers",
        "ClientData",
        "ClientUpdate",
        "FederatedAveraging",
        "LocalTraining",
        "Partition",
        "Record",
        "Round",
        "Segment",
        "Subspace",
        "WeightUpdate",
        "answering_clients",
        "average_updates",
        "client_updates",
        "dirichlet_split",
        "fixed_split",
        "group_split",
        "iid_split",
        "principal_subspace",
        "segment_similarity",
        "train_client",
    ],
    "leakwatch.models": [
        "AlexNet",
        "CIFAR100CNN",
        "FEMNISTCNN",
        "FedAvgModule",
        "LeNet",
        "LinearClassifier",
        "LitClassifier",
        "MLP",
        "ResNet152",
        "ResNet18",
        "ResNet8",
        "SMELeNet",
        "SMEResNet8",
        "SMEViT",
        "Scheme",
        "ShuffleNetV2",
        "VGG9",
        "ViTB16",
        "build_model",
        "initialize",
        "register_model",
        "register_scheme",
        "registered_models",
        "registered_schemes",
    ],
    "leakwatch.priors": [
        "CosinePrior",
        "DensePrior",
        "GaussianPrior",
        "MeasuredPrior",
        "measured_prior",
        "natural_prior",
    ],
    "leakwatch.probes": ["ProbeSet"],
    "leakwatch.spectrum": [
        "DampedSolution",
        "DenseFactor",
        "DenseOperator",
        "Ends",
        "Estimate",
        "FactorOperator",
        "SpectralMeasure",
        "Spectrum",
        "SymmetricOperator",
        "as_factor",
        "as_operator",
        "damped",
        "ends",
        "exact",
        "lanczos",
        "power",
        "precision_floor",
        "quadrature",
        "trace",
    ],
    "leakwatch.reproduction": [
        "Estimate",
        "Experiment",
        "Result",
        "estimate",
        "names",
        "read",
        "reproduce",
    ],
    "leakwatch.studies": [
        "Applied",
        "Attacked",
        "Cell",
        "Check",
        "ClassRisk",
        "InitializationComparison",
        "NoiseRecommendation",
        "Outcome",
        "Point",
        "ProbeNoise",
        "Ranked",
        "SampleRisk",
        "TradeOff",
        "TradeOffRow",
        "Unfairness",
        "Verdict",
        "compare_initializations",
        "recommend_noise",
        "trade_off",
        "unfairness",
    ],
}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_the_checked_in_list(module: str) -> None:
    found = importlib.import_module(module)
    assert sorted(found.__all__) == sorted(PUBLIC[module])
    for name in found.__all__:
        assert getattr(found, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        importlib.import_module("leakwatch").nonsense  # noqa: B018


def test_importing_the_package_does_not_load_torch() -> None:
    code = "import leakwatch, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_scores_work_without_lightning_wandb_and_plotly() -> None:
    code = """
import sys
for name in ("lightning", "wandb", "plotly", "pandas", "torchmetrics"):
    sys.modules[name] = None
import torch, leakwatch
net = torch.nn.Linear(4, 3)
found = leakwatch.score(net, torch.rand(2, 4), torch.tensor([0, 2]), noise_std=1e-3)
assert bool(torch.isfinite(found["lavp_l2_max"]).all())
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_links_at_the_top_lead_into_the_package() -> None:
    for name in ("callbacks", "configs", "datamodules"):
        link = ROOT / name
        assert link.is_symlink()
        assert link.resolve() == ROOT / "leakwatch" / name


def test_a_wheel_installed_elsewhere_has_every_public_name(tmp_path: Path) -> None:
    pytest.importorskip("build", reason="needs the `build` package")
    source = tmp_path / "source"
    ignore = ("--exclude-standard", "--cached", "--others")
    listed = subprocess.run(
        ["git", "ls-files", "-z", *ignore],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.decode().split("\0")):
        origin, copy = ROOT / name, source / name
        if origin.is_file() and not origin.is_symlink():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(origin.read_bytes())
        elif origin.is_symlink():
            copy.symlink_to(origin.readlink())
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", tmp_path],
        cwd=source,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    elsewhere = tmp_path / "elsewhere"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(elsewhere)
    assert "leakwatch/py.typed" in names
    for kind in ("j2", "css", "js", "yaml"):
        ours = {
            str(path.relative_to(ROOT)) for path in ROOT.glob(f"leakwatch/**/*.{kind}")
        }
        assert ours
        assert ours == {n for n in names if n.endswith(f".{kind}")}
    assert {n.partition("/")[0] for n in names} == {
        "leakwatch",
        "lightning_leakwatch-0.1.0.dist-info",
    }
    code = "import importlib, leakwatch\n" + "\n".join(
        f"m = importlib.import_module({module!r}); [getattr(m, n) for n in {names!r}]"
        for module, names in PUBLIC.items()
    )
    code += """
from leakwatch.reporting import RiskLedger, Row, write_report
RiskLedger("run").append([Row(0, 0, 7, 1, "i2f_psnr", 21.5)])
assert "a predicted PSNR of" in write_report("run").read_text("utf-8")
"""
    code += f"\nassert leakwatch.__file__.startswith({str(elsewhere)!r})"
    subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys; sys.path.insert(0, {str(elsewhere)!r})\n{code}",
        ],
        cwd=tmp_path,
        check=True,
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    options = [
        "--trainer.max_epochs=1",
        "--trainer.limit_train_batches=2",
        "--trainer.limit_val_batches=1",
        "--trainer.enable_progress_bar=false",
        "--trainer.callbacks.probes=1",
        "--trainer.callbacks.at_start=false",
        "--trainer.callbacks.every_n_epochs=1",
        "--trainer.logger=lightning.pytorch.loggers.CSVLogger",
        "--trainer.logger.save_dir=runs",
    ]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "leakwatch", "fit"),
            *("--config", "leakwatch:quickstart", *options),
        ],
        cwd=empty,
        env={**os.environ, "PYTHONPATH": str(elsewhere)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (report,) = empty.rglob("report.html")
    assert f"report: {report}" in done.stdout


def test_nothing_installs_the_namesake_on_the_index() -> None:
    # The name `leakwatch` on the package index is another project's.
    listed = subprocess.run(
        ["git", "grep", "-nIE", r"pip install.*[^-./]\bleakwatch\b"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode > 1:
        pytest.skip("not a git checkout")
    here = Path(__file__).name
    assert [line for line in listed.stdout.splitlines() if here not in line] == []


def test_the_oldest_versions_are_those_that_are_declared() -> None:
    pinned = subprocess.run(
        [sys.executable, ROOT / "tests/oldest.py", ROOT / "pyproject.toml"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    declared = (ROOT / "pyproject.toml").read_text()
    assert "torch==2.5.*" in pinned
    assert "wandb==0.23.*" in pinned
    assert "lpips==0.1.4" in pinned
    for pin in pinned:
        assert f'"{pin.removesuffix(".*").replace("==", ">=")}"' in declared
