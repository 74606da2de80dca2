// What chat and race share: an answer's text with its marks, and their legend.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { count, milliseconds, plural, rate } from "./format.js";
import { renderMarkdown } from "./markdown.js";
import { useStore } from "./store.js";
import { describe, TokenText } from "./tokens.js";

const FRAME_MS = 40;

/** Calls `draw` when the answer has changed, at most 25 times a second and less if it takes long,
    and at once when it has ended: its text is there when its figures are. */
export function useDrawn(answer, draw, dependencies) {
  useLayoutEffect(() => {
    let timer = null;
    let pause = FRAME_MS;
    const now = () => {
      timer = null;
      const began = performance.now();
      draw();
      pause = Math.max(FRAME_MS, 6 * (performance.now() - began));
    };
    now();
    const stops = [
      answer.changed.subscribe(() => (timer ??= setTimeout(now, pause))),
      answer.status.subscribe((status) => {
        if (status === "streaming") return;
        clearTimeout(timer);
        now();
      }),
    ];
    return () => {
      stops.forEach((stop) => stop());
      clearTimeout(timer);
      if (timer !== null) draw();
    };
  }, [answer, ...dependencies]);
}

export function Marked({ answer, label }) {
  const root = useRef(null);
  const view = useRef(null);
  const [picked, setPicked] = useState(-1);
  useLayoutEffect(() => {
    view.current = new TokenText(root.current, setPicked);
    return () => view.current.close();
  }, [answer]);
  useDrawn(answer, () => view.current.show(answer.tokens, answer.text), []);
  return (
    <>
      <div ref={root} class="tokens" tabIndex={0} role="group"
        aria-label={`${label}, token by token. Arrow keys go through the tokens.`} />
      <p class="picked-token" aria-live="polite">{describe(answer, picked) ?? ""}</p>
    </>
  );
}

/** What the model thought before its answer. The marks show it too, as tokens. */
export function Reasoning({ answer }) {
  const root = useRef(null);
  useDrawn(answer, () => { root.current.textContent = answer.reasoning; }, []);
  return <div ref={root} class="reasoning soft" role="group" aria-label="Reasoning" />;
}

export function Formatted({ answer }) {
  const root = useRef(null);
  useDrawn(answer, () => renderMarkdown(root.current, answer.text), []);
  return <div ref={root} class="prose" />;
}

export function Legend({ answer }) {
  const status = useStore(answer.status);
  useStore(answer.changed);
  const [, tick] = useState(0);
  useEffect(() => {
    if (status !== "streaming") return undefined;
    const timer = setInterval(() => tick((n) => n + 1), 250);
    return () => clearInterval(timer);
  }, [status]);
  const { byOrigin, drafted, accepted } = answer;
  const beyond = accepted - drafted;
  const length = answer.acceptanceLength;
  if (!answer.tokens.length && !answer.usage) return null;
  return (
    <dl class="legend">
      {answer.tokens.length > 0 && (
        <>
          <div><dt><span class="key draft" aria-hidden="true">a</span>Drafted and accepted</dt><dd data-figure="drafted">{count(byOrigin.draft)}</dd></div>
          {byOrigin.lookup > 0 && (
            <div title="Repeats what stands in the prompt or the answer before">
              <dt><span class="key lookup" aria-hidden="true">a</span>Looked up and accepted</dt><dd data-figure="lookup">{count(byOrigin.lookup)}</dd>
            </div>
          )}
          {byOrigin.grammar > 0 && (
            <div title="The schema of the answer leaves no other choice">
              <dt><span class="key grammar" aria-hidden="true">a</span>Given by the schema</dt><dd data-figure="grammar">{count(byOrigin.grammar)}</dd>
            </div>
          )}
          <div><dt><span class="key own" aria-hidden="true">a</span>The target’s own</dt><dd data-figure="own">{count(byOrigin.target)}</dd></div>
          {status === "done" && beyond > 0 && (
            <div title="A last step may have drafts accepted beyond the end of the answer">
              <dt>Accepted beyond the end</dt><dd data-figure="beyond">{count(beyond)}</dd>
            </div>
          )}
        </>
      )}
      {length !== null && <div><dt>Tokens a step</dt><dd data-figure="length">{length.toFixed(2)}</dd></div>}
      {answer.speed !== null && <div><dt>Tokens a second</dt><dd data-figure="speed">{rate(answer.speed)}</dd></div>}
      {answer.firstMs !== null && <div><dt>First token</dt><dd data-figure="first">{milliseconds(answer.firstMs)}</dd></div>}
    </dl>
  );
}

export const finished = (answer) =>
  answer.finish === "length" ? `Cut at the limit of ${plural(answer.count, "token")}.` : "";
