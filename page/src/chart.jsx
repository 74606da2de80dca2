import { useEffect, useRef } from "preact/hooks";
import uPlot from "uplot";
import { figures, SPAN_S } from "./figures.js";
import { useStore } from "./store.js";

const STYLES = {
  a: { colour: "--mark-a", width: 2, dash: undefined },
  b: { colour: "--mark-b", width: 2, dash: [5, 4] },
};

/** Values of the last two minutes. `lines`: {name, field, style, unit, show, stepped, scale}. */
export function Chart({ title, lines, empty }) {
  const { samples } = useStore(figures);
  const box = useRef(null);
  const plot = useRef(null);
  const latest = samples.at(-1);
  const words = lines.map((line) => `${line.name} ${line.show(latest?.[line.field] ?? null)}`).join(", ");

  useEffect(() => {
    const element = box.current; // Preact forgets it before this effect ends
    const make = () => {
      plot.current?.destroy();
      plot.current = new uPlot(optionsOf(lines, element), dataOf(lines), element);
    };
    make();
    const resized = new ResizeObserver(() => plot.current?.setSize({ width: element.clientWidth, height: element.clientHeight }));
    resized.observe(element);
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", make);
    addEventListener("aerie-theme", make);
    return () => {
      resized.disconnect();
      scheme.removeEventListener("change", make);
      removeEventListener("aerie-theme", make);
      plot.current.destroy();
      plot.current = null;
    };
  }, []);
  useEffect(() => { plot.current?.setData(dataOf(lines)); }, [samples]);

  return (
    <figure class="chart">
      <figcaption>
        <span class="chart-title">{title}</span>
        {lines.map((line) => (
          <span key={line.name} class="line-key">
            <svg viewBox="0 0 18 6" class={`stroke-${line.style}`} aria-hidden="true"><path d="M0 3H18" /></svg>
            {line.name} <strong>{line.show(latest?.[line.field] ?? null)}</strong>
          </span>
        ))}
      </figcaption>
      <div class="plot" ref={box} role="img" aria-label={`${title}, last two minutes. Now: ${words}.`} />
      {empty && <p class="soft">{empty}</p>}
    </figure>
  );
}

function dataOf(lines) {
  const { samples } = figures.value;
  const end = performance.now() / 1000;
  return [samples.map((s) => s.t - end), ...lines.map((line) => samples.map((s) => s[line.field]))];
}

function optionsOf(lines, box) {
  // A canvas does not know light-dark(): the browser computes the colour.
  const colour = (name) => {
    box.style.color = `var(${name})`;
    return getComputedStyle(box).color;
  };
  const font = `${Math.round(parseFloat(getComputedStyle(document.documentElement).fontSize) * 0.6875)}px system-ui, sans-serif`;
  const grid = { stroke: colour("--plot-line"), width: 1 };
  const scales = [...new Set(lines.map((line) => line.scale ?? "y"))];
  const axis = (scale, i) => ({
    scale,
    side: i ? 1 : 3,
    stroke: colour("--plot-text"),
    font,
    size: 40,
    gap: 4,
    ticks: { show: false },
    grid: i ? { show: false } : grid,
    space: 28,
    values: (_, ticks) => ticks.map((tick) => (lines.some((l) => (l.scale ?? "y") === scale && l.whole) && tick % 1 ? "" : Intl.NumberFormat("en", { notation: "compact" }).format(tick))),
  });
  return {
    width: box.clientWidth,
    height: box.clientHeight,
    padding: [6, scales.length > 1 ? 0 : 16, 0, 0],
    legend: { show: false },
    cursor: { show: false },
    select: { show: false },
    scales: {
      x: { time: false, range: () => [-SPAN_S, 0] },
      ...Object.fromEntries(scales.map((scale) => [scale, { range: (_, low, high) => [0, Math.max(1, high ?? 1) * 1.1] }])),
    },
    axes: [
      {
        stroke: colour("--plot-text"),
        font,
        size: 24,
        gap: 8,
        ticks: { show: false },
        grid: { show: false },
        splits: () => [-120, -60, 0],
        values: () => ["2 min", "1 min", "now"],
        align: 0,
      },
      ...scales.map(axis),
    ],
    series: [
      {},
      ...lines.map((line) => ({
        scale: line.scale ?? "y",
        stroke: colour(STYLES[line.style].colour),
        width: STYLES[line.style].width,
        dash: STYLES[line.style].dash,
        points: { show: false },
        spanGaps: Boolean(line.spanGaps),
        paths: line.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
      })),
    ],
  };
}
