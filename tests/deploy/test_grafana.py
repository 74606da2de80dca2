"""The dashboards' JSON is what their code makes, and every panel explains itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.grafana.__main__ import rendered
from deploy.grafana.dashboard_queries import FOLDER

PROVISIONING = FOLDER.parents[1]
COMPOSE = Path(__file__).resolve().parents[2] / "docker-compose.yml"
NAMES = sorted(file.name for file in FOLDER.glob("*.json"))
PANELS = [
    pytest.param(panel, id=f"{name}-{panel['title']}")
    for name in NAMES
    for panel in json.loads((FOLDER / name).read_text("utf-8"))["panels"]
    if panel["type"] != "row"
]


def test_the_files_are_up_to_date() -> None:
    made = rendered()
    assert sorted(made) == NAMES
    for name, text in made.items():
        assert (FOLDER / name).read_text("utf-8") == text, "run: python -m deploy.grafana"


@pytest.mark.parametrize("panel", PANELS)
def test_a_panel_says_what_it_shows(panel: dict[str, Any]) -> None:
    assert panel["description"].endswith(".")
    assert panel["datasource"]["uid"] == "${datasource}"
    assert panel["targets"]
    for target in panel["targets"]:
        # Whoever picks a gateway sees that gateway only.
        selectors = target["expr"].count("{")
        assert target["expr"].count("$instance") == selectors > 0
        assert target["legendFormat"]


@pytest.mark.parametrize("panel", PANELS)
def test_a_present_figure_is_asked_for_now(panel: dict[str, Any]) -> None:
    """The last value of a range can be 30 minutes old."""
    present = panel["type"] in ("stat", "bargauge")
    for target in panel["targets"]:
        assert (target.get("instant", False), target["range"]) == (present, not present)


@pytest.mark.parametrize("name", NAMES)
def test_a_gateway_can_be_chosen_from_the_start_of_its_process(name: str) -> None:
    variables = json.loads((FOLDER / name).read_text("utf-8"))["templating"]["list"]
    chosen = {each["name"]: each["query"] for each in variables}
    assert chosen["model"] == "label_values(aerie_model_info, model_name)"
    assert chosen["instance"] == 'label_values(aerie_model_info{model_name=~"$model"}, instance)'


@pytest.mark.parametrize("name", NAMES)
def test_panels_have_their_places(name: str) -> None:
    taken: set[tuple[int, int]] = set()
    panels = json.loads((FOLDER / name).read_text("utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells


def test_provisioning_has_no_unknown_field() -> None:
    """Grafana passes over a field that it does not know; these are the ones that it documents."""
    dashboards = yaml.safe_load((PROVISIONING / "dashboards" / "aerie.yml").read_text("utf-8"))
    assert dashboards["apiVersion"] == 1
    [provider] = dashboards["providers"]
    assert set(provider) <= {
        *("name", "orgId", "folder", "folderUid", "type", "disableDeletion"),
        *("updateIntervalSeconds", "allowUiUpdates", "options"),
    }
    assert set(provider["options"]) <= {"path", "foldersFromFilesStructure"}
    assert provider["type"] == "file"
    sources = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text("utf-8"))
    assert sources["apiVersion"] == 1
    [source] = sources["datasources"]
    assert set(source) <= {
        *("name", "type", "access", "orgId", "uid", "url", "user", "database", "basicAuth"),
        *("basicAuthUser", "withCredentials", "isDefault", "jsonData", "secureJsonData"),
        *("version", "editable"),
    }
    assert (source["type"], source["access"]) == ("prometheus", "proxy")
    assert set(source["jsonData"]) <= {"httpMethod", "timeInterval", "queryTimeout", "manageAlerts"}


def test_grafana_finds_what_is_provisioned() -> None:
    """The paths inside the container, and the address and interval of the datasource, are those
    of docker-compose.yml and prometheus.yml."""
    compose = yaml.safe_load(COMPOSE.read_text("utf-8"))["services"]
    mounts = dict(volume.split(":")[:2] for volume in compose["grafana"]["volumes"])
    outside = "./deploy/grafana/provisioning"
    for folder in ("dashboards", "datasources"):
        assert mounts[f"{outside}/{folder}"] == f"/etc/grafana/provisioning/{folder}"
    inside = mounts[f"{outside}/dashboards"]
    [provider] = yaml.safe_load((PROVISIONING / "dashboards" / "aerie.yml").read_text("utf-8"))[
        "providers"
    ]
    assert provider["options"]["path"] == f"{inside}/json"
    home = compose["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert (FOLDER / Path(home).name).exists()
    assert Path(home).parent == Path(provider["options"]["path"])
    [source] = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text("utf-8"))[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"
    prometheus = yaml.safe_load((COMPOSE.parent / "deploy/prometheus/prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == prometheus["global"]["scrape_interval"]
    [job] = prometheus["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["gateway:8000"]}]
    assert "gateway" in compose
