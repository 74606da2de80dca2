import { useEffect, useRef, useState } from "preact/hooks";
import { Answer } from "./answer.js";
import { figures } from "./figures.js";
import { copy } from "./markdown.js";
import { finished, Formatted, Legend, Marked, Reasoning } from "./parts.jsx";
import { Store, useStore } from "./store.js";

const SUGGESTIONS = [
  "Write a Python function that checks whether a text is a palindrome.",
  "Explain in three sentences why the sky is blue.",
  "List ten animals that live in the sea.",
];

const options = new Store({ system: "", temperature: 0, maxTokens: 256, maxK: "" });
const marks = new Store(true);

function bodyOf(turns, now) {
  const { system, temperature, maxTokens, maxK } = options.value;
  const messages = [];
  for (const { question, answer } of turns) {
    // Templates may refuse two messages of the user in a row: a question without an answer goes with the next one.
    if (messages.at(-1)?.role === "user") messages.at(-1).content += `\n\n${question}`;
    else messages.push({ role: "user", content: question });
    if (answer?.text) messages.push({ role: "assistant", content: answer.text });
  }
  if (system.trim()) messages.unshift({ role: "system", content: system.trim() });
  return {
    model: now?.model,
    messages,
    temperature,
    max_tokens: maxTokens,
    speculation: { tokens: now?.tells_tokens ?? true, ...(maxK === "" ? {} : { max_k: Number(maxK) }) },
  };
}

export function Chat() {
  const [turns, setTurns] = useState([]);
  const [draft, setDraft] = useState("");
  const running = useRef(null);
  const [busy, setBusy] = useState(false);
  const [said, setSaid] = useState("");
  const list = useRef(null);
  const field = useRef(null);

  const ask = async (earlier, question) => {
    if (running.current || !question.trim()) return;
    const answer = new Answer();
    const body = bodyOf([...earlier, { question }], figures.value.now);
    running.current = new AbortController();
    setBusy(true);
    setSaid("The model answers.");
    setTurns([...earlier, { question, answer }]);
    await answer.run("/v1/chat/completions", body, running.current.signal);
    running.current = null;
    setBusy(false);
    const ends = { done: `Answered, ${answer.count} tokens.`, stopped: "Stopped." };
    setSaid(ends[answer.status.value] ?? "");
  };
  const send = () => {
    const question = draft;
    if (busy || !question.trim()) return;
    setDraft("");
    ask(turns, question);
  };
  const stop = () => running.current?.abort();
  const retry = (index) => ask(turns.slice(0, index), turns[index].question);

  useEffect(() => {
    const area = field.current;
    area.style.height = "auto";
    area.style.height = `${Math.min(area.scrollHeight + 2, 240)}px`;
  }, [draft]);
  useFollowing(list, turns);

  return (
    <section class="chat" aria-labelledby="chat-title" onKeyDown={(e) => e.key === "Escape" && stop()}>
      <h2 id="chat-title" class="hidden">Chat</h2>
      <div class="turns" ref={list}>
        {turns.length ? (
          <ol>{turns.map((turn, i) => (
            <Turn key={turn.answer} turn={turn} busy={busy} onRetry={() => retry(i)} last={i === turns.length - 1} />
          ))}</ol>
        ) : <Welcome onAsk={(question) => ask([], question)} />}
      </div>
      <p class="hidden" role="status">{said}</p>
      <form class="composer" noValidate onSubmit={(e) => { e.preventDefault(); send(); }}>
        <label class="hidden" for="question">Message</label>
        <textarea id="question" ref={field} rows="1" value={draft} placeholder="Ask the model"
          onInput={(e) => setDraft(e.target.value)}
          onKeyDown={(e) => {
            // 229: Safari's key that ends the writing of a word in an input method, when nothing is composed any more.
            const composes = e.isComposing || e.keyCode === 229;
            if (e.key === "Enter" && !e.shiftKey && !composes) { e.preventDefault(); send(); }
          }} />
        <div class="row">
          <Settings />
          <MarksSwitch />
          {turns.length > 0 && <button type="button" class="quiet" disabled={busy} onClick={() => setTurns([])}>New chat</button>}
          <span class="grow" />
          {busy
            ? <button type="button" class="primary" onClick={stop}><span class="square" aria-hidden="true" />Stop</button>
            : <button type="submit" class="primary" disabled={!draft.trim()}>Send</button>}
        </div>
      </form>
    </section>
  );
}

/** Keeps the end of the list in sight while it grows, unless somebody has scrolled up. */
function useFollowing(list, turns) {
  const atEnd = useRef(true);
  useEffect(() => {
    const box = list.current;
    const follow = () => { if (atEnd.current) box.scrollTop = box.scrollHeight; };
    const note = () => { atEnd.current = box.scrollHeight - box.scrollTop - box.clientHeight < 48; };
    box.addEventListener("scroll", note, { passive: true });
    const observer = new ResizeObserver(follow);
    for (const child of box.children) observer.observe(child);
    follow();
    return () => { observer.disconnect(); box.removeEventListener("scroll", note); };
  }, [turns.length > 0]);
  useEffect(() => {
    atEnd.current = true;
    list.current.scrollTop = list.current.scrollHeight;
  }, [turns.length]);
}

function Welcome({ onAsk }) {
  return (
    <div class="welcome">
      <p class="big">See who writes each word.</p>
      <p>
        A small draft head proposes several tokens at once, and the model checks them all in a single
        step. What you read is always what the model would have written alone, only sooner:
      </p>
      <p class="tokens sample">
        <span class="t own">Tokens</span><span class="t drafted draft p1"> like</span><span class="t drafted draft p2"> these</span><span class="t drafted draft p3"> were</span>
        <span class="t own"> drafted</span><span class="t drafted draft p1"> and</span><span class="t own"> accepted</span><span class="t drafted draft p1">,</span><span class="t drafted draft p2"> the</span><span class="t own"> underlined</span><span class="t drafted draft p1"> ones</span><span class="t own"> are</span><span class="t drafted draft p1"> the</span><span class="t drafted draft p2"> target’s</span><span class="t own"> own</span><span class="t own">.</span>
      </p>
      <ul class="suggestions">
        {SUGGESTIONS.map((text) => <li key={text}><button type="button" onClick={() => onAsk(text)}>{text}</button></li>)}
      </ul>
      <p class="soft">Or see the difference in time: <a href="#race">race the model against itself</a>.</p>
    </div>
  );
}

function Turn({ turn: { question, answer }, busy, last, onRetry }) {
  const status = useStore(answer.status);
  const marked = useStore(marks);
  const [copied, setCopied] = useState("");
  const over = status !== "waiting" && status !== "streaming";
  return (
    <li class="turn">
      <div class="question"><span class="hidden">You: </span>{question}</div>
      <div class={`answer ${status}`}>
        <span class="hidden">The model: </span>
        {status === "waiting" && <p class="soft waiting">Waiting for the first token…</p>}
        {status !== "waiting" && !(marked && answer.tokens.length) && <Reasoning answer={answer} />}
        {status !== "waiting" && (marked && (answer.tokens.length || !over)
          ? <Marked answer={answer} label="The answer" />
          : <Formatted answer={answer} />)}
        {answer.problem && <p class="problem" role="alert">{answer.problem.message}</p>}
        {status === "stopped" && <p class="soft">Stopped.</p>}
        {over && finished(answer) && <p class="soft">{finished(answer)}</p>}
        <Legend answer={answer} />
        {over && (
          <div class="row">
            {last && <button type="button" class="quiet" disabled={busy} onClick={onRetry}>Try again</button>}
            {answer.text && (
              <button type="button" class="quiet" onClick={async () => {
                setCopied((await copy(answer.text)) ? "Copied" : "Not copied");
                setTimeout(() => setCopied(""), 1500);
              }}>{copied || "Copy"}</button>
            )}
          </div>
        )}
      </div>
    </li>
  );
}

function MarksSwitch() {
  const marked = useStore(marks);
  return (
    <button type="button" class="quiet toggle" aria-pressed={marked} onClick={() => marks.set(!marked)}>
      <span class="key draft" aria-hidden="true">a</span>Marks
    </button>
  );
}

function Settings() {
  const value = useStore(options);
  const { now } = useStore(figures);
  const most = now?.speculation?.k_max ?? 0;
  const box = useRef(null);
  useEffect(() => {
    const close = (event) => { if (!box.current.contains(event.target)) box.current.open = false; };
    addEventListener("pointerdown", close);
    return () => removeEventListener("pointerdown", close);
  }, []);
  const changed = Object.entries({ system: "", temperature: 0, maxTokens: 256, maxK: "" }).filter(([k, v]) => value[k] !== v).length;
  const number = (name, low, high, fits = Number.isFinite) => (event) => {
    const n = Number(event.target.value);
    if (event.target.value !== "" && n >= low && n <= high && fits(n)) options.update({ [name]: n });
  };
  return (
    <details class="popover" ref={box} onKeyDown={(e) => {
      if (e.key === "Escape" && box.current.open) { box.current.open = false; box.current.querySelector("summary").focus(); e.stopPropagation(); }
    }}>
      <summary class="button quiet">Settings{changed ? ` (${changed})` : ""}</summary>
      <div class="panel">
        <label>System prompt
          <textarea rows="3" value={value.system} placeholder="None" onInput={(e) => options.update({ system: e.target.value })} />
        </label>
        <div class="fields">
          <label>Temperature
            <NumberField min="0" max="2" step="0.1" value={value.temperature} onInput={number("temperature", 0, 2)} />
          </label>
          <label>Most tokens
            <NumberField min="1" max={now?.context ?? 131072} step="1" value={value.maxTokens} onInput={number("maxTokens", 1, now?.context ?? 131072, Number.isInteger)} />
          </label>
          <label>Draft tokens a step
            <select value={value.maxK} disabled={!now?.drafts} onChange={(e) => options.update({ maxK: e.target.value })}>
              <option value="">As the policy chooses</option>
              <option value="0">None</option>
              {Array.from({ length: most }, (_, i) => <option key={i} value={String(i + 1)}>At most {i + 1}</option>)}
            </select>
          </label>
        </div>
      </div>
    </details>
  );
}

/** A number, with what is being typed left as it is; once the field is left, it shows the value that is in force. */
function NumberField({ value, onInput, ...input }) {
  const [typed, setTyped] = useState(null);
  return (
    <input {...input} type="number" value={typed ?? String(value)}
      onInput={(e) => { setTyped(e.target.value); onInput(e); }} onBlur={() => setTyped(null)} />
  );
}
