import { useEffect, useRef, useState } from "preact/hooks";
import { access, PHASES, useKey } from "./api.js";
import { Chat } from "./chat.jsx";
import { figures, follow } from "./figures.js";
import { Live } from "./live.jsx";
import { Race } from "./race.jsx";
import { useStore } from "./store.js";

const VIEWS = { chat: "Chat", race: "Race", live: "Live" };

/** What the address says after its #. */
function useView() {
  const read = () => (Object.hasOwn(VIEWS, location.hash.slice(1)) ? location.hash.slice(1) : "chat");
  const [view, setView] = useState(read);
  useEffect(() => {
    const onChange = () => setView(read());
    addEventListener("hashchange", onChange);
    return () => removeEventListener("hashchange", onChange);
  }, []);
  return view;
}

/** Whether a media query holds. */
export function useMedia(query) {
  const list = useRef(matchMedia(query));
  const [matches, setMatches] = useState(list.current.matches);
  useEffect(() => {
    const onChange = () => setMatches(list.current.matches);
    list.current.addEventListener("change", onChange);
    return () => list.current.removeEventListener("change", onChange);
  }, []);
  return matches;
}

export function App() {
  const view = useView();
  const wide = useMedia("(min-width: 68rem)");
  const huge = useMedia("(min-width: 118rem)");
  const { now } = useStore(figures);
  useEffect(follow, []);
  const shown = (name) => name === view || (name === "live" && wide) || (name !== "live" && huge)
    || (wide && view === "live" && name === "chat");
  return (
    <>
      <a class="skip" href="#main" onClick={(e) => { e.preventDefault(); document.getElementById("main").focus(); }}>
        Skip to the content
      </a>
      <header class="top">
        <h1 class="brand"><Logo />Aerie</h1>
        <span class="model" title="The served model">{now?.model ?? ""}</span>
        {!huge && (
          <nav aria-label="Views">
            {Object.entries(VIEWS).filter(([name]) => !(wide && name === "live")).map(([name, title]) => (
              <a key={name} href={`#${name}`}
                aria-current={name === view || (wide && view === "live" && name === "chat") ? "page" : undefined}>
                {title}
              </a>
            ))}
          </nav>
        )}
        <div class="ends">
          <Status />
          <ThemeButton />
          <KeyButton />
        </div>
      </header>
      <main id="main" tabIndex={-1} class={huge ? "huge" : wide ? "wide" : "narrow"}>
        <div class="view" hidden={!shown("chat")}><Chat /></div>
        <div class="view" hidden={!shown("race")}><Race /></div>
        <div class="view side" hidden={!shown("live")}>{shown("live") && <Live />}</div>
      </main>
      <KeyDialog />
    </>
  );
}

function Logo() {
  return (
    <svg viewBox="0 0 32 32" aria-hidden="true">
      <rect width="32" height="32" rx="8" />
      <path d="M7 22 13 9" /><path d="M14 22l4.6-10" /><path d="M20.5 22l3-6.5" />
    </svg>
  );
}

function Status() {
  const { now, problem } = useStore(figures);
  const phase = problem && !problem.status ? "lost" : now?.phase ?? "lost";
  const words = problem && !problem.status ? "The gateway cannot be reached" : PHASES[now?.phase] ?? "Connecting";
  return (
    <span class={`status ${phase === "ready" ? "good" : "waits"}`} role="status">
      <span class="shape" aria-hidden="true" />
      <span class="words">{words}</span>
    </span>
  );
}

const THEMES = ["auto", "light", "dark"];

function ThemeButton() {
  const [theme, setTheme] = useState(() => localStorage.getItem("aerie-theme") ?? "auto");
  useEffect(() => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    localStorage.setItem("aerie-theme", theme);
    dispatchEvent(new Event("aerie-theme"));
  }, [theme]);
  const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  return (
    <button type="button" class="quiet icon" onClick={() => setTheme(next)}
      aria-label={`Colours: ${theme}. Switch to ${next}`} title={`Colours: ${theme}`}>
      <svg viewBox="0 0 20 20" aria-hidden="true">
        <circle cx="10" cy="10" r="7" fill="none" stroke="currentColor" stroke-width="1.6" />
        {theme !== "light" && <path d={theme === "dark" ? "M10 3a7 7 0 1 0 0 14 7 7 0 0 0 0-14" : "M10 3a7 7 0 0 1 0 14z"} fill="currentColor" />}
      </svg>
    </button>
  );
}

function KeyButton() {
  const { key } = useStore(access);
  if (!key) return null;
  return <button type="button" class="quiet" onClick={() => access.update({ wanted: true, refused: false })}>Key</button>;
}

function KeyDialog() {
  const { wanted, refused, key } = useStore(access);
  const dialog = useRef(null);
  useEffect(() => {
    if (wanted && !dialog.current.open) dialog.current.showModal();
    if (!wanted && dialog.current.open) dialog.current.close();
  }, [wanted]);
  const submit = (event) => {
    event.preventDefault();
    const given = new FormData(event.target).get("key").trim();
    if (given) useKey(given);
  };
  return (
    <dialog ref={dialog} aria-labelledby="key-title" onCancel={() => access.update({ wanted: false })}>
      <form onSubmit={submit}>
        <h2 id="key-title">This gateway asks for a key</h2>
        <p>It stays in this tab and is gone when you close it.</p>
        {refused && <p class="problem" role="alert">The gateway does not know that key.</p>}
        <label>API key
          <input name="key" type="password" autocomplete="off" autofocus spellcheck={false} required />
        </label>
        <div class="row end">
          {key && <button type="button" class="quiet" onClick={() => useKey("")}>Forget the key</button>}
          <button type="submit" class="primary">Use this key</button>
        </div>
      </form>
    </dialog>
  );
}
