"""Dashboards and rules against a live gateway: what they ask exists, and Prometheus answers it."""

from __future__ import annotations

import math
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from deploy.grafana.dashboard_queries import DashboardQuery, queries
from deploy.grafana.picture import Span, picture
from docs.metrics import exported as declared

from .bodies import greedy
from .gateway import MODEL, Gateway
from .prometheus import RULES, Prometheus, scraping
from .prompts import PROMPTS

QUERIES = list(queries())
RECORDED: list[tuple[str, str]] = []  # name, expression; an alert's name has no colon
for file in sorted(RULES.glob("*.yml")):
    for group in yaml.safe_load(file.read_text("utf-8"))["groups"]:
        RECORDED += [(r.get("record") or r["alert"], r["expr"]) for r in group["rules"]]

# A healthy gateway without keys has nothing to show for these: their names and labels are checked
# on /metrics, their panels stay empty.
SILENT = {
    "aerie_requests_refused_total",
    "aerie_key_reloads_total",
    "aerie_head_swap_seconds_sum",  # no head learns here
    "aerie_head_swap_seconds_count",
}
# Prometheus' own, of every scrape.
GIVEN = {"up": {"job", "instance"}}
TARGET = {"job", "instance", "namespace", "service"}  # the last two in Kubernetes
WINDOW = "1m"  # all of the load
AT_ONCE = (1, 4)
REQUESTS = 6
# Unit of a panel -> largest sane value. A scrape may fall between two counters of a ratio.
MOST = {"percentunit": 1.05, "suffix:×": 50.0}


def named(expr: str) -> dict[str, set[str]]:
    """Metric -> labels that an expression compares."""
    found: dict[str, set[str]] = {}
    for name, braces in re.findall(r"\b((?:vllm:|aerie[_:])[\w:]+|up\b)(?:\{([^}]*)\})?", expr):
        found.setdefault(name, set()).update(re.findall(r"(\w+)\s*[=!]~?\"?", braces or ""))
    return found


def grouped(expr: str) -> set[str]:
    """Labels that an expression groups or joins by."""
    lists = re.findall(r"\b(?:by|on) \(([^)]*)\)", expr)
    return {label.strip() for labels in lists for label in labels.split(",")}


@pytest.fixture(scope="module")
def exported(http: httpx.Client) -> dict[str, set[str]]:
    """Sample name -> labels on /metrics; those of ours that have no sample yet are declared."""
    http.post(
        "/v1/completions", json={"model": MODEL, "prompt": "x = ", "max_tokens": 8}
    ).raise_for_status()
    found = {name: set(labels) for name, labels in GIVEN.items()}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    for name, metric in declared().items():
        found.setdefault(name, set()).update(metric._labelnames)
    return found


@pytest.mark.parametrize(
    ("name", "expr"), [(str(query), query.expr) for query in QUERIES] + RECORDED
)
def test_metrics_and_labels_exist(exported: dict[str, set[str]], name: str, expr: str) -> None:
    recorded = {name for name, _ in RECORDED}
    used = {n: labels for n, labels in named(expr).items() if n not in recorded}
    assert used or named(expr), "no metric in this query"
    assert set(used) <= set(exported), f"not on /metrics: {set(used) - set(exported)}"
    for metric, labels in used.items():
        unknown = labels - exported[metric] - TARGET
        assert not unknown, f"{metric} has no label {unknown}"
    if used:
        known = set().union(*(exported[metric] for metric in used)) | TARGET
        assert grouped(expr) <= known, f"nothing here has {grouped(expr) - known}"


@dataclass
class Load:
    prometheus: Prometheus
    began: float
    ended: float


@pytest.fixture(scope="module")
def load(
    gateway: Gateway, http: httpx.Client, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Load]:
    """Prometheus has seen a few requests, one after the other and at once, a deadline that
    passed, and a client with too large a header."""
    with scraping(gateway.url, tmp_path_factory.mktemp("prometheus")) as prometheus:
        prometheus.wait("up == 1")
        began = time.time()
        for at_once in AT_ONCE:
            with ThreadPoolExecutor(at_once) as pool:
                for status in pool.map(lambda i: complete(http, i), range(REQUESTS)):
                    assert status == 200
        # A counter begins with what it first counted: a rate sees what comes after that.
        fail(http, gateway.url)
        prometheus.wait('aerie_responses_total{status="504"} > 0')
        fail(http, gateway.url)
        prometheus.wait("rate(aerie_connections_refused_total[1m]) > 0")
        prometheus.wait("rate(aerie_requests_expired_total[1m]) > 0")
        prometheus.wait("aerie:errors:ratio_rate5m > 0")
        prometheus.wait("aerie:speedup:ratio_rate5m > 0")
        yield Load(prometheus, began, time.time())


def complete(http: httpx.Client, number: int) -> int:
    body = greedy(PROMPTS[number % len(PROMPTS)], max_tokens=96)
    return http.post("/v1/completions", json=body).status_code


def fail(http: httpx.Client, url: str) -> None:
    """A deadline that passes, and a header beyond the bound."""
    late = http.post(
        "/v1/completions",
        json=greedy(PROMPTS[0], max_tokens=1500),
        headers={"x-request-timeout": "0.05"},
    )
    assert late.status_code == 504
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), 10) as connection:
        connection.sendall(
            b"GET /livez HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 65536 + b"\r\n\r\n"
        )
        connection.settimeout(10)
        assert b" 431 " in connection.recv(100)


@pytest.mark.parametrize("query", QUERIES, ids=str)
def test_a_panel_shows_what_happened(load: Load, query: DashboardQuery) -> None:
    expr = query.filled(WINDOW)
    shown = load.prometheus.ask(
        "query_range",
        query=expr,
        start=load.ended - int(load.ended - load.began),
        end=load.ended,
        step=1,
    )["result"]
    numbers = [float(value) for series in shown for _, value in series["values"]]
    if not set(named(expr)) & SILENT:
        assert [n for n in numbers if math.isfinite(n)], "the panel is empty"
    last = load.prometheus.values(expr, load.ended)
    # A quantile of no requests is not a number, and Grafana leaves it out.
    assert all(math.isnan(n) or 0 <= n <= MOST.get(query.unit, math.inf) for n in last), last
    assert not [n for n in numbers if math.isinf(n) or n < 0]


@pytest.mark.parametrize(
    ("expr", "least", "most"),
    [
        ("aerie:speedup:ratio_rate5m", 0.1, 50),
        ("aerie:acceptance_length:ratio_rate5m", 1, 12),
        ("aerie:acceptance:ratio_rate5m", 0, 1.05),
        ("aerie:k:mean_rate5m", 0, 11),
        ("aerie:steps_without_drafts:ratio_rate5m", 0, 1.05),
        ("aerie:output_tokens:rate5m", 0.1, 1e5),
        ("aerie:ttft_seconds:quantile_rate5m", 0, 120),
        ("aerie:e2e_seconds:quantile_rate5m", 0, 120),
        ("aerie:errors:ratio_rate5m", 0.001, 0.9),
        ("aerie:kv_usage:max", 0, 1),
    ],
)
def test_recorded_figures_are_sane(load: Load, expr: str, least: float, most: float) -> None:
    values = load.prometheus.values(expr, load.ended)
    assert values, "nothing was recorded"
    assert all(least <= value <= most for value in values), values


def test_no_rule_fails(load: Load) -> None:
    rules: list[dict[str, Any]] = [
        rule for group in load.prometheus.ask("rules")["groups"] for rule in group["rules"]
    ]
    assert len(rules) == len(RECORDED)
    bad = [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"]
    assert not bad
    # Every alert waits before it fires, and a minute of a healthy gateway is no reason to.
    firing = [rule["name"] for rule in rules if rule.get("state") == "firing"]
    assert not firing
    for name, _ in RECORDED:
        if ":" in name:
            assert load.prometheus.values(name, load.ended), f"{name} has no series"


@pytest.mark.parametrize("name", sorted({query.dashboard for query in QUERIES}))
def test_a_dashboard_can_be_drawn(load: Load, name: str, tmp_path: Path) -> None:
    """docs/images without a Grafana: every kind of panel has its way of drawing."""
    file = tmp_path / f"{name}.png"
    picture(name, Span(load.prometheus.http, load.began, load.ended)).savefig(file)
    assert file.read_bytes()[:4] == b"\x89PNG"


def test_the_variables_find_this_gateway(load: Load, gateway: Gateway) -> None:
    models = load.prometheus.ask(
        "label/model_name/values", **{"match[]": "vllm:num_requests_running"}
    )
    assert models == [MODEL]
    where = f'vllm:num_requests_running{{model_name=~"{MODEL}"}}'
    found = load.prometheus.ask("label/instance/values", **{"match[]": where})
    assert found == [gateway.url.removeprefix("http://")]
