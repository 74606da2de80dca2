// What the gateway is doing: one small request a second while somebody looks, kept for two minutes.
import { access, LOST, Problem, request } from "./api.js";
import { Store } from "./store.js";

export const SPAN_S = 120;
const SMOOTHED_OVER_S = 3;
const PATIENCE_MS = 10_000; // with a gateway that says nothing

/** `now`: the newest answer of /page/figures. `samples`: what the charts show, oldest first. */
export const figures = new Store({ now: null, problem: null, samples: [] });

let last = [];
let timer;

function rateOf(name, newest) {
  const oldest = last.find((entry) => newest.t - entry.t <= SMOOTHED_OVER_S + 0.5) ?? newest;
  const grown = newest.counters[name] - oldest.counters[name];
  return { grown, per: newest.t - oldest.t };
}

const nothing = (t) => ({ t, gateway: null, k: null, running: null, waiting: null, speed: null, first: null, token: null, kv: null });

function sampleOf(now, t) {
  const { gateway } = now;
  if (!now.counters) {
    last = [];
    return { ...nothing(t), gateway };
  }
  const newest = { t, gateway, counters: now.counters };
  const before = last.at(-1);
  if (before && (gateway !== before.gateway || newest.counters.output_tokens < before.counters.output_tokens)) {
    last = []; // it is another gateway's, or another engine's
  }
  const tokens = rateOf("output_tokens", newest);
  const firsts = rateOf("first_tokens", newest);
  const firstSeconds = rateOf("first_token_s", newest);
  const decode = rateOf("decode_s", newest);
  last = [...last.slice(-9), newest];
  const later = tokens.grown - firsts.grown;
  return {
    t,
    gateway,
    k: now.speculation?.batch_k ?? (now.drafts ? null : 0),
    running: now.counters.running,
    waiting: now.counters.waiting + now.gate_waiting,
    speed: tokens.per > 0 ? tokens.grown / tokens.per : null,
    first: firsts.grown > 0 ? (1000 * firstSeconds.grown) / firsts.grown : null,
    token: later > 0 ? (1000 * decode.grown) / later : null,
    kv: 100 * now.kv_usage,
  };
}

/** Whether a load balancer shares these samples out: the gateway of an earlier one has come back after another's. One
    that is started again is another too, but the one before it does not come back. */
export function severalGateways(samples) {
  const answered = samples.map(({ gateway }) => gateway).filter((gateway) => gateway !== null);
  const changes = answered.filter((gateway, i) => i > 0 && gateway !== answered[i - 1]).length;
  return changes > 0 && changes >= new Set(answered).size;
}

async function poll() {
  clearTimeout(timer);
  if (document.hidden || access.value.wanted) return;
  const { samples } = figures.value;
  const t = performance.now() / 1000;
  const kept = samples.filter((sample) => t - sample.t <= SPAN_S + 2);
  // A page that was out of sight knows nothing of that time: its lines have a gap there.
  if (kept.length && t - kept.at(-1).t > 3) kept.push(nothing(t - 1));
  try {
    const response = await request("/page/figures", { signal: AbortSignal.timeout(PATIENCE_MS) });
    const now = await response.json().catch(() => { throw new Problem(LOST); });
    figures.set({ now, problem: null, samples: [...kept, sampleOf(now, t)] });
  } catch (problem) {
    if (!(problem instanceof Problem)) throw problem;
    last = [];
    figures.set({ now: problem.status ? figures.value.now : null, problem, samples: kept });
  } finally {
    clearTimeout(timer);
    timer = setTimeout(poll, 1000);
  }
}

export function follow() {
  document.addEventListener("visibilitychange", poll);
  access.subscribe(({ wanted }) => wanted || poll());
  poll();
}

/** Ask now, for instance after a change. */
export const refresh = () => poll();
