"""The kinds of panels, with one style and one datasource; every panel has a description."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    timeseries,
    xychart,
)
from grafana_foundation_sdk.builders.xychart import XychartXYSeriesConfigX as ConfigX
from grafana_foundation_sdk.builders.xychart import XychartXYSeriesConfigY as ConfigY
from grafana_foundation_sdk.models import (
    common as looks,
)
from grafana_foundation_sdk.models import (
    dashboard as models,
)
from grafana_foundation_sdk.models import (
    heatmap as heat,
)
from grafana_foundation_sdk.models import (
    prometheus as queries,
)
from grafana_foundation_sdk.models import (
    xychart as xy,
)

DATASOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
REFS = "ABCDEFGH"
HEIGHT = 8  # rows of Grafana's grid; it is 24 columns wide
JOINED = models.DataTransformerConfig(
    id_val="joinByField", options={"byField": "Time", "mode": "outer"}
)
# Labels of the chosen series. The gateway's own have no label for the model: $instance lists the
# gateways of the chosen model.
OURS = 'instance=~"$instance"'
VLLM = 'instance=~"$instance", model_name=~"$model"'


@dataclass(frozen=True)
class Query:
    """One PromQL expression and what its series are called."""

    expr: str
    legend: str = ""

    def build(self, ref: str, now: bool) -> prometheus.Dataquery:
        """The query as a panel's target: over the panel's time, or for its value `now` alone.

        The last value of a time range can be as old as the range.
        """
        made = prometheus.Dataquery().ref_id(ref).expr(self.expr).legend_format(self.legend)
        made = made.instant() if now else made.range()
        return made.format(queries.PromQueryFormat.TIME_SERIES)


def rate(metric: str, by: str = "", labels: str = OURS, window: str = "$__rate_interval") -> str:
    """The summed rate of a counter over the chosen gateways."""
    grouped = f"sum by ({by}) " if by else "sum"
    return f"{grouped}(rate({metric}{{{labels}}}[{window}]))"


def ratio(above: str, below: str, by: str = "", window: str = "$__rate_interval", **kw: str) -> str:
    """Ratio of two counters' rates; no value where the rate below is 0."""
    return f"{rate(above, by, window=window, **kw)} / ({rate(below, by, window=window, **kw)} > 0)"


def quantile(share: float, metric: str) -> str:
    """A quantile of one of vLLM's histograms."""
    return f"histogram_quantile({share}, {rate(f'{metric}_bucket', 'le', VLLM)})"


def quantiles(metric: str) -> list[Query]:
    """Median, 95% and 99% quantiles of one of vLLM's histograms."""
    return [Query(quantile(share, metric), f"p{share * 100:.0f}") for share in (0.5, 0.95, 0.99)]


def lines(
    title: str,
    description: str,
    targets: Sequence[Query],
    *,
    unit: str = "short",
    width: int = 12,
    stacked: bool = False,
    least: float | None = 0.0,
    most: float | None = None,
) -> Any:
    """Lines over time, or areas on top of each other."""
    panel = timeseries.Panel().fill_opacity(40 if stacked else 8).line_width(0 if stacked else 2)
    panel = panel.show_points(looks.VisibilityMode.NEVER)
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(looks.StackingMode.NORMAL))
    panel = panel.tooltip(
        common.VizTooltipOptions()
        .mode(looks.TooltipDisplayMode.MULTI)
        .sort(looks.SortOrder.DESCENDING)
    )
    panel = panel.legend(
        common.VizLegendOptions()
        .display_mode(looks.LegendDisplayMode.LIST)
        .placement(looks.LegendPlacement.BOTTOM)
        .show_legend(True)
    )
    if least is not None:
        panel = panel.min(least)
    if most is not None:
        panel = panel.max(most)
    return _finish(panel, title, description, targets, unit, width, HEIGHT)


def number(
    title: str,
    description: str,
    query: Query,
    *,
    unit: str = "short",
    decimals: int = 2,
    steps: Sequence[tuple[float | None, str]] = ((None, "blue"),),
    width: int = 4,
) -> Any:
    """One present figure, coloured by `steps` of (from, colour)."""
    panel = (
        stat.Panel()
        .decimals(decimals)
        .no_value("–")
        .color_mode(looks.BigValueColorMode.VALUE)
        .graph_mode(looks.BigValueGraphMode.NONE)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(_thresholds(steps))
    )
    return _finish(panel, title, description, [query], unit, width, 4, now=True)


def bars(
    title: str,
    description: str,
    query: Query,
    *,
    unit: str,
    most: float,
    steps: Sequence[tuple[float | None, str]],
    width: int = 8,
) -> Any:
    """One bar per series, for its present value."""
    panel = (
        bargauge.Panel()
        .min(0)
        .max(most)
        .orientation(looks.VizOrientation.HORIZONTAL)
        .display_mode(looks.BarGaugeDisplayMode.GRADIENT)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(_thresholds(steps))
    )
    return _finish(panel, title, description, [query], unit, width, HEIGHT, now=True)


def heat_of_series(
    title: str, description: str, query: Query, *, unit: str, axis: str, width: int = 12
) -> Any:
    """A heat map: time across, one row per series, the value as colour."""
    panel = (
        heatmap.Panel()
        .calculate(False)
        .rows_frame(heatmap.RowsHeatmapOptions().layout(looks.HeatmapCellLayout.AUTO))
        .color(
            heatmap.HeatmapColorOptions()
            .mode(heat.HeatmapColorMode.SCHEME)
            .scheme("Spectral")
            .reverse(True)
            .steps(64)
            .exponent(0.5)
        )
        .cell_values(heatmap.CellValues().unit(unit))
        .y_axis(heatmap.YAxisConfig().axis_label(axis))
        .show_value(looks.VisibilityMode.NEVER)
        .cell_gap(1)
    )
    return _finish(panel, title, description, [query], unit, width, HEIGHT)


def cloud(
    title: str, description: str, x: Query, y: Query, *, unit: str = "short", width: int = 12
) -> Any:
    """A scatter plot of one query against another, with a point for every moment."""

    def field(name: str) -> Any:
        return xychart.MatcherConfig().id("byName").options(name)

    series = (
        xychart.XYSeriesConfig()
        .x(ConfigX().matcher(field(x.legend)))
        .y(ConfigY().matcher(field(y.legend)))
    )
    panel = (
        xychart.Panel()
        .mapping(xy.SeriesMapping.MANUAL)
        .series([series])
        .show(xy.XYShowMode.POINTS)
        .min(0)
        .with_transformation(JOINED)
    )
    return _finish(panel, title, description, [x, y], unit, width, HEIGHT)


Part = Callable[[], tuple[str, list[Any]]]  # a heading and the panels under it


def board(uid: str, title: str, description: str, parts: Sequence[Part]) -> Any:
    """A dashboard of these parts, with the variables that every panel here uses."""
    known = "aerie_model_info"  # of every gateway, from the start of its process
    everything = models.VariableOption(text="All", value="$__all", selected=True)

    def labels(name: str, label: str, query: str) -> Any:
        return (
            dashboard.QueryVariable(name)
            .label(label)
            .datasource(DATASOURCE)
            .query(f"label_values({query})")
            .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(models.VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
            .current(everything)
        )

    made = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["aerie"])
        .readonly()
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(
            dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus")
        )
        .with_variable(labels("model", "Model", f"{known}, model_name"))
        .with_variable(labels("instance", "Gateway", f'{known}{{model_name=~"$model"}}, instance'))
        .link(
            dashboard.DashboardLink("Aerie")
            .type(models.DashboardLinkType.DASHBOARDS)
            .tags(["aerie"])
            .keep_time(True)
            .include_vars(True)
        )
    )
    for part in parts:
        heading, panels = part()
        made = made.with_row(dashboard.Row(heading))
        for panel in panels:
            made = made.with_panel(panel)
    return made


def _thresholds(steps: Sequence[tuple[float | None, str]]) -> Any:
    return (
        dashboard.ThresholdsConfig()
        .mode(models.ThresholdsMode.ABSOLUTE)
        .steps([models.Threshold(value=value, color=color) for value, color in steps])
    )


def _finish(
    panel: Any,
    title: str,
    description: str,
    targets: Sequence[Query],
    unit: str,
    width: int,
    height: int,
    *,
    now: bool = False,
) -> Any:
    assert len(targets) <= len(REFS), "more queries than letters"
    panel = panel.title(title).description(description).datasource(DATASOURCE).unit(unit)
    for letter, query in zip(REFS, targets, strict=False):
        panel = panel.with_target(query.build(letter, now))
    return panel.span(width).height(height)
