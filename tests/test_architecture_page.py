"""docs/architecture.md: its examples run as they stand and are found by their names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"

#: Heading → what has to work once its example has run.
USES = {
    "A score": """
scores = leakwatch.score(net, x, y, ["matching_condition"], dtype=torch.float64)
assert scores.status["matching_condition"][0].usable
assert bool((scores["matching_condition"] > 1).all())
LeakageMonitor(scores=["matching_condition"])
""",
    "An attack": """
images = leakwatch.attack(net, x, y, "nearest-guess", steps=5, data_range=1.0).images
assert images.shape == x.shape
few, many = (
    leakwatch.attack(net, x, y, "tv-descent", steps=n, data_range=1.0, seed=0)
    for n in (1, 60)
)
assert bool((many.relative < 0.9 * few.relative).all())
InversionAudit(attack="tv-descent")
InversionAudit(attack="nearest-guess")
""",
    "An attack on weight updates": """
before = torch.cat([p.detach().flatten() for p in net.parameters()])
after = before + 0.01 * torch.randn(2, len(before))
update = leakwatch.WeightUpdate(
    before, after, torch.tensor([[0, 2], [1, 1]]), (1, 3, 3), samples=2
)
result = leakwatch.attack_update(net, update, "one-gradient", steps=5, data_range=1.0)
assert result.images.shape == (2, 2, 1, 3, 3)
UpdateAudit(attack="one-gradient")
""",
    "A generator": """
result = leakwatch.attack(
    net, x, y, "small-decoder", weight_steps=3, restarts=1, data_range=1.0
)
assert result.images.shape == x.shape
""",
    "A defense": """
GradientDefense(Rounding(Budget(0.1)))
gradient = torch.randn(2, 500)
shared = Rounding(Budget(0.1, "relative")).protect(
    gradient, generator=torch.Generator()
)
moved = (shared.delta.norm(dim=1) / gradient.norm(dim=1)).mean()
assert 0.08 < float(moved) < 0.12
""",
    "A model and a data module": """
module = LitClassifier("tinynet", model_args={"width": 4}, image_size=8)
assert module(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
data = StripesDataModule()
data.setup("fit")
images, labels = next(iter(data.train_dataloader()))
assert images.shape == (32, 1, 8, 8)
assert set(labels.tolist()) == {0, 1}
""",
    "A prior": """
prior = BrightCentre(3)
scores = leakwatch.score(net, x, y, ["bayes"], noise_std=1e-2, prior=prior)
assert [s.usable for s in scores.status["i2f_range_psnr"]] == [True] * 3
LeakageMonitor(prior=prior)
assert torch.allclose(prior.covariance @ prior.precision, torch.eye(9).double())
""",
    "A rule for a type of layer": """
from leakwatch.attacks import SharedGradient
from leakwatch.attacks.matching.objective import MatchingProblem

scaled = nn.Sequential(Gain(4), nn.Tanh(), nn.Linear(4, 3))
at = leakwatch.GradientMap(scaled)
images, labels = torch.rand(2, 4), torch.tensor([0, 2])
problem = MatchingProblem(at, SharedGradient.of(at, images, labels), path="layerwise")
with problem.opened() as matcher:
    value = matcher.evaluate(images[:, None], labels[:, None], torch.arange(2))
assert bool((value.distance < 1e-10).all())
""",
}

START = """
import torch
from torch import nn
import leakwatch
from leakwatch.callbacks import (
    GradientDefense, InversionAudit, LeakageMonitor, UpdateAudit
)
from leakwatch.models import LitClassifier
torch.manual_seed(0)
net = nn.Sequential(nn.Flatten(), nn.Linear(9, 12), nn.Sigmoid(), nn.Linear(12, 3))
x, y = torch.rand(3, 1, 3, 3), torch.tensor([0, 1, 2])
"""


def examples() -> dict[str, str]:
    """Heading → its example."""
    sections = re.split(r"^### ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    return {
        section.splitlines()[0]: "\n".join(blocks)
        for section in sections
        if (blocks := re.findall(r"```python\n(.*?)```", section, re.DOTALL))
    }


def test_every_example_has_a_use() -> None:
    assert set(examples()) == set(USES)


def test_the_examples_work_together(tmp_path: Path) -> None:
    # In a process of their own, because a name can be registered once.
    script = tmp_path / "examples.py"
    parts = [
        f"print({name!r})\n{text}\n{USES[name]}" for name, text in examples().items()
    ]
    script.write_text(START + "\n".join(parts))
    paths = [str(PAGE.parents[1]), os.environ.get("PYTHONPATH", "")]
    ran = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )
    assert ran.returncode == 0, f"{ran.stdout}{ran.stderr}"
    assert ran.stdout.splitlines()[-1] == list(USES)[-1]


def test_the_page_names_every_folder() -> None:
    text = PAGE.read_text()
    package = PAGE.parents[1] / "leakwatch"
    folders = {p.parent.name for p in package.glob("*/__init__.py")}
    assert [name for name in sorted(folders) if f"`{name}/`" not in text] == []
