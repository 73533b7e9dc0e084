"""The documents: what they show runs, links lead somewhere, nothing is left out."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from test_architecture import PUBLIC

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
NOTEBOOKS = sorted(DOCS.glob("notebooks/*.ipynb"))
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("**/*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    fence = re.compile(rf"^```{language}\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return fence.findall(page.read_text())


def test_notebooks_are_in_step_with_the_tutorials(tmp_path: Path) -> None:
    ran = subprocess.run(
        [
            sys.executable,
            "-c",
            "import json, runpy, sys\n"
            "made = runpy.run_path(sys.argv[1])\n"
            "print(json.dumps({n: made['notebook'](n) for n in made['NAMES']}))",
            str(DOCS / "extensions" / "notebooks.py"),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    made = json.loads(ran.stdout)
    assert set(made) == {path.stem for path in NOTEBOOKS}
    for path in NOTEBOOKS:
        assert json.loads(path.read_text()) == made[path.stem], (
            f"run python docs/extensions/notebooks.py, which writes {path.name}"
        )


#: What a notebook promises of its results, beside what it asserts itself.
PROMISES = {
    "own-project": """
assert enough.status.usable and enough.noise_std > 0.01
assert by_class.loc[by_class[10].idxmax(), 10] > 20
assert all(status.word == "ok" for status in found.status)
assert (achieved - torch.tensor(worst["value"].to_numpy())).abs().max() < 3
""",
    "attack": "assert (scores['i2f_range_psnr'] - achieved).abs().max() < 2",
    "defense": """
assert enough.status.usable
assert enough.noise_std > 0.01
assert accuracy(net) > accuracy(noisy) > 50
""",
    "federated": "assert (scores['joint_i2f_bayes_psnr'] > psnr.view(3, 4)).all()",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_code_of_a_notebook_runs(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # In this process, which has imported what takes most of the time.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    scope: dict[str, Any] = {"__name__": "__main__"}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), path.name, "exec"), scope)
    exec(PROMISES[path.stem], scope)


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_in_jupyter(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ipykernel", reason="needs the `docs` extra")
    nbformat = pytest.importorskip("nbformat")
    client: Any = pytest.importorskip("nbclient")

    monkeypatch.setenv("PYTHONPATH", _path())
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    client.NotebookClient(
        notebook,
        timeout=None,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
    ).execute()


def test_code_of_readme_and_concepts_runs(tmp_path: Path) -> None:
    code = "\n".join(blocks(ROOT / "README.md", "python"))
    assert "LeakageMonitor" in code
    assert "leakwatch.attack(" in code
    code += """
assert found.images.shape == x.shape
assert scores["i2f_bayes_psnr"].shape == (4,)
assert trainer.callbacks[0].every_n_epochs == 5
"""
    pages = [*sorted(DOCS.glob("concepts/*.md")), DOCS / "index.md"]
    others = [block for page in pages for block in blocks(page, "python")]
    assert others
    # In a process of their own: no test sees what they leave behind.
    ran = subprocess.run(
        [sys.executable, "-c", "\n".join([code, *others])],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": _path()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def _path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def test_fragments_are_python() -> None:
    for page in PAGES:
        for text in (*blocks(page, "py"), *blocks(page, "python")):
            compile(text, str(page), "exec")


def test_fragments_import_what_exists() -> None:
    imports = set()
    for page in PAGES:
        for text in blocks(page, "py"):
            imports |= set(
                re.findall(r"^from leakwatch.*?(?:\(.*?\)|$)", text, re.M | re.S)
            )
    if find_spec("flwr") is None:
        imports = {line for line in imports if "integrations.flower" not in line}
    else:  # without the warnings of what Flower imports
        pytest.importorskip("leakwatch.integrations.flower")
    code = "\n".join(sorted(imports))
    assert "GradientDefense" in code
    exec(compile(code, "imports", "exec"), {})


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_name_what_exists(page: Path) -> None:
    from leakwatch.cli.configs import find_config
    from leakwatch.cli.main import _COMMANDS

    commands = "\n".join(blocks(page, "console"))
    for name in re.findall(r"leakwatch:([\w/]+)", page.read_text()):
        find_config(f"leakwatch:{name}")
    for command in re.findall(r"^leakwatch ([a-z-]+)", commands, re.MULTILINE):
        assert command in _COMMANDS
    for script in re.findall(r"python (benchmarks/\w+\.py)", page.read_text()):
        assert (ROOT / script).is_file()


def test_links_of_the_readme_lead_somewhere() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"):
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / name).read_text()):
            if not link.startswith("http"):
                assert (ROOT / link).exists(), f"{name}: {link}"


def test_files_cited_in_the_code_exist() -> None:
    for folder in ("leakwatch", "benchmarks", "tests"):
        for path in (ROOT / folder).glob("**/*"):
            if path.suffix not in (".py", ".yaml", ".j2"):
                continue
            for cited in re.findall(r"docs/[\w/.-]+\.md", path.read_text()):
                assert (ROOT / cited).is_file(), f"{path}: {cited}"


def test_every_public_module_has_a_page() -> None:
    shown = set()
    for page in DOCS.glob("reference/*.md"):
        shown |= set(re.findall(r"^::: (\S+)", page.read_text(), re.MULTILINE))
    assert {m for m in PUBLIC if m not in shown} <= {"leakwatch.probes"}


def test_nothing_is_fetched_to_read_the_site() -> None:
    config = (ROOT / "mkdocs.yml").read_text()
    assert "font: false" in config
    assert "http" not in config
    assert "http" not in (DOCS / "site.css").read_text()


@pytest.mark.long
def test_the_federated_quickstart_ends_with_conclusive_attacks(tmp_path: Path) -> None:
    configs = ("leakwatch:federated_mnist", "leakwatch:update_audit/sme")
    ran = subprocess.run(
        [sys.executable, "-m", "leakwatch", "fit"]
        + [word for name in configs for word in ("--config", name)]
        + ["--trainer.enable_progress_bar=false"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": _path()},
        capture_output=True,
        text=True,
        check=True,
    )
    audits = re.findall(r"(\d) of (\d) recovered", ran.stderr)
    assert len(audits) == 2
    assert all(int(recovered) >= 1 for recovered, _ in audits)
