"""The dashboards' queries to Prometheus, read from the JSON that Grafana reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "provisioning" / "dashboards" / "json"


@dataclass(frozen=True)
class DashboardQuery:
    """A query of a panel of a dashboard."""

    dashboard: str
    panel: str
    kind: str  # Grafana's name of the panel's type
    unit: str
    legend: str
    expr: str

    def filled(self, window: str) -> str:
        """PromQL for all models and gateways, with rates over `window`."""
        expr = self.expr.replace("$__rate_interval", window)
        return expr.replace("$instance", ".+").replace("$model", ".+")

    def __str__(self) -> str:
        return f"{self.dashboard}/{self.panel}/{self.legend}".replace(" ", "-")


def panels(name: str, headings: bool = False) -> list[dict[str, Any]]:
    """The panels of a dashboard in reading order, or its headings, as Grafana's JSON has them."""
    document = json.loads((FOLDER / f"{name}.json").read_text("utf-8"))
    return [panel for panel in document["panels"] if (panel["type"] == "row") == headings]


def queries() -> Iterator[DashboardQuery]:
    """Every query of every dashboard."""
    for file in sorted(FOLDER.glob("*.json")):
        for panel in panels(file.stem):
            unit = panel["fieldConfig"]["defaults"].get("unit", "")
            for target in panel["targets"]:
                yield DashboardQuery(
                    file.stem,
                    panel["title"],
                    panel["type"],
                    unit,
                    target["legendFormat"],
                    target["expr"],
                )
