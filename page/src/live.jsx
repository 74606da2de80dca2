import { useEffect, useState } from "preact/hooks";
import { request } from "./api.js";
import { Chart } from "./chart.jsx";
import { figures, refresh } from "./figures.js";
import { count, milliseconds, percent, plural, rate, ratio } from "./format.js";
import { useStore } from "./store.js";

const whole = (n) => (n == null ? "–" : count(n));
const OBJECTIVES = {
  throughput: "Most tokens a second",
  latency: "Tokens in time",
  fixed: "A fixed K",
  off: "No drafts",
};

export function Live() {
  const { now, problem } = useStore(figures);
  const policy = now?.speculation;
  return (
    <section class="live" aria-labelledby="live-title">
      <h2 id="live-title">Live</h2>
      {problem && <p class="problem">{problem.status ? problem.message : "The gateway cannot be reached. This page tries again every second."}</p>}
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
  const [k, setK] = useState(policy.k);
  const [target, setTarget] = useState(50);
  const [sending, setSending] = useState(false);
  useEffect(() => { if (policy.objective === "fixed" && !sending) setK(policy.k); }, [policy.objective, policy.k]);
  const change = async (changes) => {
    setSending(true);
    try {
      await request("/v1/speculation", { method: "PATCH", body: changes });
      setProblem("");
      await refresh();
    } catch (error) {
      setProblem(error.message);
    } finally {
      setSending(false);
    }
  };
  const choose = (objective) => change({
    objective,
    ...(objective === "fixed" ? { k } : {}),
    ...(objective === "latency" ? { tpot_s: target / 1000 } : {}),
  });
  return (
    <fieldset class="steering" disabled={!admin}>
      <legend>What K is chosen for</legend>
      <div class="choices">
        {Object.entries(OBJECTIVES).map(([name, title]) => (
          <label key={name}><input type="radio" name="objective" value={name} checked={policy.objective === name} onChange={() => choose(name)} /><span>{title}</span></label>
        ))}
      </div>
      {policy.objective === "fixed" && (
        <label class="slider">K = <output>{k}</output>
          <input type="range" min="0" max={policy.k_max} step="1" value={k} aria-label="K"
            onInput={(e) => setK(Number(e.target.value))} onChange={(e) => change({ objective: "fixed", k: Number(e.target.value) })} />
        </label>
      )}
      {policy.objective === "latency" && (
        <label class="slider">Milliseconds a token
          <input type="number" min="0.001" max="3600000" step="any" value={policy.tpot_s ? +(policy.tpot_s * 1000).toPrecision(6) : target}
            onChange={(e) => { const ms = Number(e.target.value); if (ms > 0) { setTarget(ms); change({ objective: "latency", tpot_s: ms / 1000 }); } }} />
        </label>
      )}
      {policy.why && <p class="soft why">{policy.why}</p>}
      {!admin && <p class="soft">Only an admin’s key may change this.</p>}
      {problem && <p class="problem" role="alert">{problem}</p>}
    </fieldset>
  );
}
