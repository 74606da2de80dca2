"""Write docs/metrics.md from app/observability/metrics.py: python -m docs.metrics"""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import Counter, Gauge, Histogram

from app.observability import metrics
from deploy.grafana.dashboard_queries import queries

PAGE = Path(__file__).with_name("metrics.md")
RULES = Path(__file__).resolve().parent.parent / "deploy" / "prometheus" / "rules"
TEXT = """\
# Metrics

Made from `app/observability/metrics.py` by `python -m docs.metrics`; a test keeps it so.

`GET /metrics` is Prometheus' text format. What the figures of speculation mean, and how to read
them, is in [speculation.md](speculation.md); what to watch for abuse in [security.md](security.md);
ratios, quantiles and alerts in [alerts.md](alerts.md). No label holds what a client sent.
With `data_parallel_size` counters of speculation are sums over all copies of the engine, and gauges
(`aerie_k`, `aerie_*_estimate*`) the first copy's.
Series that only say when another one began (`*_created`) are left out. Those of the process and of
Python (`process_*`, `python_*`) are as Prometheus' client for Python exports them; alerts use
`process_start_time_seconds`.

## The gateway's

| metric | type | labels | what it is |
|---|---|---|---|
{ours}

## vLLM's

vLLM's own metrics keep their names and labels (`engine`, `model_name`), so that dashboards,
autoscalers and routers made for them go on working. Dashboards, rules and alerts here use these:

{theirs}
"""


def page() -> str:
    """The page as it should be."""
    return TEXT.format(ours="\n".join(_ours()), theirs="\n".join(_theirs()))


def exported() -> dict[str, Counter | Gauge | Histogram]:
    """Name as a scrape has it -> metric, in the module's order."""
    found: dict[str, Counter | Gauge | Histogram] = {}
    for metric in vars(metrics).values():
        if isinstance(metric, (Counter, Gauge, Histogram)):
            [family] = metric.describe()
            found[family.name + ("_total" if isinstance(metric, Counter) else "")] = metric
    return found


def _ours() -> list[str]:
    rows = []
    for name, metric in exported().items():
        [family] = metric.describe()
        labels = ", ".join(f"`{label}`" for label in metric._labelnames)
        text = family.documentation.replace("|", "\\|")
        rows.append(f"| `{name}` | {family.type} | {labels} | {text} |")
    return rows


def _theirs() -> list[str]:
    texts = [query.expr for query in queries()]
    texts += [file.read_text("utf-8") for file in RULES.glob("*.yml")]
    names = {name for text in texts for name in re.findall(r"\bvllm:\w+", text)}
    # A histogram's parts are one metric.
    return [
        f"- `{name}`" for name in sorted({re.sub(r"_(bucket|count|sum)$", "", n) for n in names})
    ]


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    print(PAGE)
