import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { Answer } from "./answer.js";
import { request } from "./api.js";
import { figures, refresh } from "./figures.js";
import { milliseconds, rate, ratio } from "./format.js";
import { useDrawn } from "./parts.jsx";
import { Store, useStore } from "./store.js";
import { TokenText } from "./tokens.js";

const PROMPTS = {
  Code: "Write a Python class for a bank account with deposit, withdraw and balance.",
  Prose: "Tell the story of a lighthouse keeper who finds a message in a bottle.",
  List: "List the planets of the solar system with one fact about each.",
};
const TOKENS = 128;

export function Race() {
  const { now } = useStore(figures);
  const [prompt, setPrompt] = useState(PROMPTS.Code);
  const [race, setRace] = useState(null);
  const [state, setState] = useState("idle"); // idle, plain, drafted, over, failed
  const [others, setOthers] = useState(false);
  const [replay, setReplay] = useState(null);
  const running = useRef(null);

  const start = async () => {
    const entry = { plain: new Answer(), drafted: new Answer() };
    const abort = (running.current = new AbortController());
    const body = (speculation, max_tokens = TOKENS) => ({
      model: now?.model, messages: [{ role: "user", content: prompt }], temperature: 0, max_tokens, speculation,
    });
    setRace(entry);
    setReplay(null);
    setState("plain");
    try {
      await refresh(); // what is known may be a second old: of an answer that has ended
      setOthers((figures.value.now?.counters?.running ?? 0) > 0);
      // So that the prompt is in the prefix cache for both, and not for the second alone.
      await request("/v1/chat/completions", { method: "POST", body: body({ enabled: false }, 1), signal: abort.signal });
    } catch (problem) {
      entry.plain.problem = abort.signal.aborted ? null : problem;
      entry.plain.status.set("failed");
      return setState("failed");
    }
    const tokens = now?.tells_tokens ?? true;
    await entry.plain.run("/v1/chat/completions", body({ enabled: false, tokens }), abort.signal);
    if (entry.plain.status.value !== "done") return setState("failed");
    setState("drafted");
    await entry.drafted.run("/v1/chat/completions", body({ tokens }), abort.signal);
    const policy = figures.value.now?.speculation;
    entry.why = policy?.batch_k === 0 ? policy.why : null;
    return setState(entry.drafted.status.value === "done" ? "over" : "failed");
  };
  const busy = state === "plain" || state === "drafted";
  useEffect(() => { if (busy && now?.counters?.running > 1) setOthers(true); }, [busy, now]);

  return (
    <section class="race" aria-labelledby="race-title" onKeyDown={(e) => e.key === "Escape" && running.current?.abort()}>
      <h2 id="race-title">The model against itself</h2>
      <p class="soft">
        The same prompt at temperature 0, first without drafts, then with them. Each runs alone, so that
        neither slows the other.
      </p>
      <form onSubmit={(e) => { e.preventDefault(); if (!busy) start(); }}>
        <label>Prompt
          <textarea rows="2" value={prompt} onInput={(e) => setPrompt(e.target.value)} required />
        </label>
        <div class="row">
          <span class="chips" role="group" aria-label="Example prompts">
            {Object.entries(PROMPTS).map(([name, text]) => (
              <button key={name} type="button" class="quiet toggle" aria-pressed={prompt === text} onClick={() => setPrompt(text)}>{name}</button>
            ))}
          </span>
          <span class="grow" />
          {busy
            ? <button type="button" class="primary" onClick={() => running.current.abort()}><span class="square" aria-hidden="true" />Stop</button>
            : <button type="submit" class="primary" disabled={!prompt.trim() || !now?.drafts}>{race ? "Race again" : "Start the race"}</button>}
        </div>
      </form>
      {now && !now.drafts && <p class="problem">This gateway was started without a drafter: there is nothing to race.</p>}
      {race && (
        <>
          <div class="lanes">
            <Lane title="Without drafts" answer={race.plain} replay={replay} busy={state === "plain"} />
            <Lane title="With drafts" answer={race.drafted} replay={replay} busy={state === "drafted"} pace={race.plain} />
          </div>
          <Verdict race={race} state={state} others={others} />
          {state === "over" && (
            <div class="row">
              <button type="button" onClick={() => setReplay(playing(race))}>Watch both at once</button>
            </div>
          )}
        </>
      )}
    </section>
  );
}

/** A clock that both lanes follow, in milliseconds since both began. */
function playing({ plain, drafted }) {
  const clock = new Store(0);
  const end = Math.max(plain.totalMs, drafted.totalMs);
  const began = performance.now();
  const tick = () => {
    clock.set(Math.min(performance.now() - began, end));
    if (clock.value < end) requestAnimationFrame(tick);
  };
  requestAnimationFrame(tick);
  return clock;
}

function Lane({ title, answer, replay, busy, pace }) {
  const status = useStore(answer.status);
  useStore(answer.changed);
  const root = useRef(null);
  const view = useRef(null);
  const [share, setShare] = useState(0);
  useLayoutEffect(() => {
    view.current = new TokenText(root.current);
    return () => view.current.close();
  }, [answer]);
  useDrawn(answer, () => {
    view.current.show(answer.tokens, answer.whole);
    setShare(answer.tokens.length / TOKENS);
    root.current.scrollTop = root.current.scrollHeight;
  }, []);
  useEffect(() => {
    if (!replay) return undefined;
    return replay.subscribe((ms) => {
      const arrived = answer.arrivals.findLast(([t]) => t <= ms) ?? [0, 0, 0];
      view.current.show(answer.tokens, answer.whole.slice(0, arrived[1]), arrived[2]);
      setShare(arrived[1] / (answer.whole.length || 1));
      root.current.scrollTop = root.current.scrollHeight;
    });
  }, [replay]);
  const over = status === "done";
  return (
    <article class={`lane ${pace ? "with" : "without"}`} aria-busy={busy}>
      <h3>{title}</h3>
      <p class="figure"><strong data-figure="speed">{rate(answer.speed)}</strong> tokens a second</p>
      <div class="track" aria-hidden="true"><svg viewBox="0 0 100 2" preserveAspectRatio="none"><rect width={100 * Math.min(1, over && !replay ? 1 : share)} height="2" /></svg></div>
      <div ref={root} class="tokens lane-text" tabIndex={0} role="group" aria-label={`Text ${title.toLowerCase()}`} />
      <dl class="legend">
        <div><dt>Time</dt><dd data-figure="time">{over ? milliseconds(answer.totalMs) : "–"}</dd></div>
        <div><dt>First token</dt><dd>{milliseconds(answer.firstMs)}</dd></div>
        <div><dt>Tokens</dt><dd>{answer.count || "–"}</dd></div>
        {answer.acceptanceLength !== null && <div><dt>Tokens a step</dt><dd>{answer.acceptanceLength.toFixed(2)}</dd></div>}
      </dl>
      {answer.problem && <p class="problem" role="alert">{answer.problem.message}</p>}
    </article>
  );
}

function Verdict({ race: { plain, drafted, why }, state, others }) {
  if (state !== "over") {
    const words = { plain: "Running without drafts…", drafted: "Running with drafts…", failed: "The race was not finished." };
    return <p class="verdict soft" role="status">{words[state] ?? ""}</p>;
  }
  const [one, other] = [plain.whole, drafted.whole];
  let same = 0;
  while (same < one.length && one[same] === other[same]) same++;
  const measured = plain.speed !== null && drafted.speed !== null;
  const undrafted = drafted.tokens.length > 0 && drafted.proposed === 0;
  return (
    <div class="verdict" role="status">
      {undrafted
        ? <p><strong class="big">Nothing was drafted.</strong>{why && ` The policy says “${why}”.`}</p>
        : <p><strong class="big" data-figure="ratio">{ratio(measured ? drafted.speed / plain.speed : null)}</strong> the tokens a second with drafts,
          {" "}{milliseconds(drafted.totalMs)} instead of {milliseconds(plain.totalMs)}.</p>}
      <p>{one === other
        ? "Both texts are identical, character by character."
        : `The texts part after ${same} characters: at equal probabilities, rounding may decide differently.`}</p>
      {others && <p class="soft">Other requests were running: measure again when it is quiet.</p>}
    </div>
  );
}
