"""``leakwatch dashboard``: a saved W&B view of what callbacks and studies log.

The view is described in plain values first. ``--dry-run`` prints those, without a
network or an account; otherwise wandb-workspaces (extra ``dashboard``) draws them.
"""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

from leakwatch.reporting.statistics.scalars import PREFIX, SHARE_ABOVE

__all__ = ["Panel", "dashboard", "describe_dashboard"]

#: ``kind`` of :data:`_KINDS`, and the arguments of that panel.
Panel: TypeAlias = dict[str, Any]

#: Kind of panel → its class in ``wandb_workspaces.reports.v2``.
_KINDS: Final = {
    "line": "LinePlot",
    "scatter": "ScatterPlot",
    "bar": "BarPlot",
    "media": "MediaBrowser",
    "table": "WeavePanelSummaryTable",
}

_MISSING: Final = (
    "a dashboard needs wandb-workspaces, which is not installed: "
    "pip install wandb-workspaces; `--dry-run` prints what it would show"
)


def dashboard(argv: list[str]) -> None:
    """Save a view in a W&B project, or print what it would show.

    Args:
        argv: Command line after ``leakwatch dashboard``.

    Raises:
        ModuleNotFoundError: wandb-workspaces is not installed.
    """
    parser = argparse.ArgumentParser(
        prog="leakwatch dashboard",
        description="Save a view in a W&B project: risk over epochs, classes, worst "
        "samples, reconstructions, predicted against achieved, trade-off, "
        "initialisations. Panels fill as runs log; none needs all.",
    )
    parser.add_argument("--entity", required=True, help="user or team")
    parser.add_argument("--project", required=True, help="that the runs are in")
    parser.add_argument("--name", default="leakwatch", help="of the view")
    parser.add_argument("--monitor", default=PREFIX, help="name of the LeakageMonitor")
    parser.add_argument(
        "--audit", default=f"{PREFIX}-audit", help="name of the InversionAudit"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the view as JSON, save nothing"
    )
    asked = parser.parse_args(argv)
    sections = describe_dashboard(asked.monitor, asked.audit)
    if asked.dry_run:
        view = {"entity": asked.entity, "project": asked.project, "name": asked.name}
        print(json.dumps({**view, "sections": sections}, indent=2, ensure_ascii=False))
    else:
        print(f"dashboard: {_saved(asked.entity, asked.project, asked.name, sections)}")


def describe_dashboard(
    monitor: str = PREFIX, audit: str = f"{PREFIX}-audit"
) -> dict[str, list[Panel]]:
    """Return section → panels, each with the keys that it draws.

    Args:
        monitor: Name of the ``LeakageMonitor`` whose keys to draw.
        audit: Name of the ``InversionAudit``.

    Example:
        >>> list(describe_dashboard())[:2]
        ['Risk over epochs', 'Classes over epochs']
    """

    def over_epochs(title: str, *keys: str, **more: Any) -> Panel:
        drawn = [f"{monitor}/{key}" for key in keys]
        x = f"{monitor}/epoch"
        return {"kind": "line", "title": title, "x": x, "y": drawn, **more}

    def achieved(kind: str) -> Panel:
        return {
            "kind": "scatter",
            "title": f"Predicted and achieved PSNR, {kind} start (dB, a point per run)",
            "x": f"{audit}/psnr/median",
            "y": f"{audit}/audit/{kind}/psnr/median",
        }

    return {
        "Risk over epochs": [
            over_epochs("Predicted PSNR (dB)", "psnr/median", "psnr/worst"),
            over_epochs("Share of samples above 20 dB", f"psnr/{SHARE_ABOVE}"),
            over_epochs("Samples without a number", "samples/unknown"),
            over_epochs("λ₁, median", "lavp_l2_max/median", log_y=True),
            over_epochs("Share of training time", "time_fraction"),
        ],
        "Classes over epochs": [
            over_epochs("Highest minus lowest class mean (dB)", "psnr/class_gap"),
            over_epochs(
                "Predicted PSNR of classes (dB; needs log='all')",
                metric_regex=f"{monitor}-class/.*psnr",
            ),
            {
                "kind": "media",
                "media_keys": [f"{monitor}/figure/classes_over_epochs"],
            },
        ],
        "Worst samples": [{"kind": "table", "table_name": f"{monitor}/samples"}],
        "Audit": [
            achieved("near"),
            achieved("random"),
            {
                "kind": "media",
                "title": "Original, reconstruction, difference (needs log_images)",
                "media_keys": [f"{audit}/reconstructions"],
            },
        ],
        "Trade-off": [
            {
                "kind": "scatter",
                "title": "PSNR of an adaptive attacker against accuracy",
                "x": "trade_off/accuracy",
                "y": "trade_off/adaptive_psnr",
            },
            {"kind": "media", "media_keys": ["trade_off/figure/privacy_utility"]},
            {"kind": "table", "table_name": "trade_off/table"},
        ],
        "Initialisations": [
            {
                "kind": "bar",
                "title": "Worst predicted PSNR of a run (dB)",
                "metrics": [f"{monitor}/psnr/worst.max"],
                "groupby": "config.initialization",
            }
        ],
    }


def _saved(
    entity: str, project: str, name: str, sections: Mapping[str, Sequence[Panel]]
) -> str:
    """Save the view and return its address."""
    view = _view(entity, project, name, sections)
    view.save_as_new_view()
    return str(view.url)


def _view(
    entity: str, project: str, name: str, sections: Mapping[str, Sequence[Panel]]
) -> Any:
    """The view as wandb-workspaces has it; saves nothing.

    Raises:
        ModuleNotFoundError: wandb-workspaces is not installed.
    """
    try:
        workspaces = importlib.import_module("wandb_workspaces.workspaces")
        reports = importlib.import_module("wandb_workspaces.reports.v2")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(_MISSING, name=error.name) from error

    def drawn(panel: Panel) -> Any:
        arguments = {key: value for key, value in panel.items() if key != "kind"}
        if panel["kind"] == "scatter":
            for axis in ("x", "y"):
                arguments[axis] = reports.SummaryMetric(panel[axis])
        if "groupby" in panel:
            arguments["groupby"] = reports.Config(panel["groupby"].partition(".")[2])
        return getattr(reports, _KINDS[panel["kind"]])(**arguments)

    return workspaces.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[
            workspaces.Section(
                name=title, panels=list(map(drawn, panels)), is_open=True
            )
            for title, panels in sections.items()
        ],
    )
