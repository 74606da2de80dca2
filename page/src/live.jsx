import { useState } from "preact/hooks";
import { request } from "./api.js";
import { Chart } from "./chart.jsx";
import { figures, refresh, severalGateways } from "./figures.js";
import { count, milliseconds, percent, plural, rate, ratio } from "./format.js";
import { useStore } from "./store.js";

const whole = (n) => (n == null ? "–" : count(n));
const OBJECTIVES = {
  throughput: "Most tokens a second",
  latency: "Tokens in time",
  fixed: "A fixed K",
  off: "No drafts",
};
let lastTpot = 0.05; // seconds a token: the last that the policy kept to, or a first proposal

export function Live() {
  const { now, problem, samples } = useStore(figures);
  const policy = now?.speculation;
  return (
    <section class="live" aria-labelledby="live-title">
      <h2 id="live-title">Live</h2>
      {problem && <p class="problem">{problem.status ? problem.message : "The gateway cannot be reached. This page tries again every second."}</p>}
      {severalGateways(samples) && (
        <p class="problem">
          Several gateways answer: open one of them. These figures are of one and another in turn, and a change reaches one alone.
        </p>
      )}
      <dl class="tiles">
        <div><dt>Speed-up, last minute</dt><dd>{ratio(policy?.speedup?.["1m"])}</dd></div>
        <div><dt>Draft tokens a step, K</dt><dd data-figure="k">{policy ? policy.batch_k : "–"}</dd></div>
        <div><dt>Tokens a second</dt><dd><LatestSpeed /></dd></div>
      </dl>
      {now && !now.drafts && <p class="soft">This gateway was started without a drafter.</p>}
      {policy && !policy.available_sources.includes("head") && (
        <p class="soft">
          This model has no draft head: what is drafted is looked up in a request’s own text, or given by its schema.
          A head drafts any text: <code>aerie train</code> makes one.
        </p>
      )}
      {policy && <Steering policy={policy} admin={now.admin} />}
      <Chart title="K and load" lines={[
        { name: "K", field: "k", style: "a", show: whole, stepped: true, whole: true },
        { name: "Running requests", field: "running", style: "b", show: whole, stepped: true, scale: "requests", whole: true },
      ]} />
      {policy && <Acceptance rows={policy.acceptance} />}
      {now?.head && <Generations head={now.head} />}
      <Chart title="Throughput" lines={[{ name: "Tokens a second", field: "speed", style: "a", show: rate }]} />
      <Chart title="Latency" lines={[
        { name: "First token", field: "first", style: "a", show: milliseconds, spanGaps: true },
        { name: "Each token after", field: "token", style: "b", show: milliseconds, scale: "token", spanGaps: true },
      ]} />
      <Chart title="Queue and memory" lines={[
        { name: "Waiting", field: "waiting", style: "a", show: whole, stepped: true, whole: true },
        { name: "KV cache", field: "kv", style: "b", show: (n) => percent(n == null ? null : n / 100), scale: "percent" },
      ]} />
    </section>
  );
}

function LatestSpeed() {
  return rate(useStore(figures).samples.at(-1)?.speed ?? null);
}

/** How often a draft at each position is accepted, as the policy believes of late. */
function Acceptance({ rows }) {
  const known = rows.filter((row) => row.trials > 0);
  return (
    <figure class="chart acceptance">
      <figcaption><span class="chart-title">Accepted, by position in the draft</span></figcaption>
      {known.length ? (
        <table>
          <thead class="hidden"><tr><th scope="col">Position</th><th scope="col">Accepted</th></tr></thead>
          <tbody>{rows.map((row) => (
            <tr key={row.position} class={row.trials > 0 ? "" : "unknown"}>
              <th scope="row">{row.position}</th>
              <td>
                <svg viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true"><rect width={100 * row.cumulative} height="8" /></svg>
                <span>{percent(row.cumulative)}</span>
              </td>
            </tr>
          ))}</tbody>
        </table>
      ) : <p class="soft">Nothing has been drafted yet.</p>}
    </figure>
  );
}

/** How many tokens of a draft were accepted, of each generation of a head that learns: more for a better head under the
    same load, as a share of its tokens need not be. */
function Generations({ head }) {
  const { trial } = head;
  const most = Math.max(...head.drafts.map(({ drafts, accepted }) => accepted / drafts));
  return (
    <figure class="chart acceptance" data-figure="generations">
      <figcaption><span class="chart-title">Accepted tokens of a draft, by generation of the head</span></figcaption>
      {head.drafts.length ? (
        <table>
          <thead class="hidden"><tr><th scope="col">Generation</th><th scope="col">Accepted</th></tr></thead>
          <tbody>{head.drafts.map(({ generation, drafts, accepted }) => (
            <tr key={generation} class={generation === head.generation ? "" : "unknown"}>
              <th scope="row">{generation}</th>
              <td>
                <svg viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true"><rect width={100 * accepted / drafts / (most || 1)} height="8" /></svg>
                <span>{(accepted / drafts).toFixed(2)}</span>
              </td>
            </tr>
          ))}</tbody>
        </table>
      ) : <p class="soft">Nothing has been drafted yet.</p>}
      <p class="soft">
        {trial
          ? `Generation ${trial.generation} is tried against ${trial.against}: ${plural(trial.pairs, "pair")} of periods${trial.ratio == null ? "" : `, ${ratio(trial.ratio)} its tokens a second`}.`
          : `Generation ${head.generation} drafts${head.pinned == null ? "" : ", pinned"}.`}
      </p>
    </figure>
  );
}

function Steering({ policy, admin }) {
  const [problem, setProblem] = useState("");
  lastTpot = policy.tpot_s ?? lastTpot;
  const change = async (changes) => {
    try {
      await request("/v1/speculation", { method: "PATCH", body: changes });
      setProblem("");
      await refresh();
    } catch (error) {
      setProblem(error.message);
    }
  };
  const choose = (objective) => change({
    objective,
    ...(objective === "fixed" ? { k: policy.k } : {}),
    ...(objective === "latency" ? { tpot_s: lastTpot } : {}),
  });
  return (
    <fieldset class="steering" disabled={!admin}>
      <legend>What K is chosen for</legend>
      <div class="choices">
        {Object.entries(OBJECTIVES).map(([name, title]) => (
          <button key={name} type="button" aria-pressed={policy.objective === name} onClick={() => choose(name)}>{title}</button>
        ))}
      </div>
      {policy.objective === "fixed" && (
        <Setting title="K" type="range" min="0" max={policy.k_max} step="1" value={policy.k} onApply={(k) => change({ objective: "fixed", k })} />
      )}
      {policy.objective === "latency" && (
        <Setting title="Milliseconds a token" type="number" min="0.001" max="3600000" step="any" required
          value={+(policy.tpot_s * 1000).toPrecision(6)} onApply={(ms) => change({ objective: "latency", tpot_s: ms / 1000 })} />
      )}
      {policy.why && <p class="soft why">{policy.why}</p>}
      {!admin && <p class="soft">Only an admin’s key may change this.</p>}
      {problem && <p class="problem" role="alert">{problem}</p>}
    </fieldset>
  );
}

/** A figure that the policy keeps to. What is entered takes effect when it is applied, whether keys or a pointer
    entered it; until then, and again after it, the policy's own figure is shown. */
function Setting({ title, value, onApply, ...input }) {
  const [entered, setEntered] = useState(null);
  const shown = entered ?? String(value);
  const apply = async (event) => {
    event.preventDefault();
    if (entered !== null) await onApply(Number(entered));
    setEntered(null);
  };
  return (
    <form class="setting" onSubmit={apply}>
      <label>{title}{input.type === "range" && <> = <output>{shown}</output></>}
        <input {...input} aria-label={title} value={shown} onInput={(e) => setEntered(e.target.value)} />
      </label>
      <button type="submit" class={entered === null ? "" : "primary"}>Apply</button>
    </form>
  );
}
