// The tokens of an answer as text that shows where each comes from. Written by hand and not by
// Preact: an answer has thousands, they only ever grow, and they come by the dozen a second.

/** What is said of an accepted draft, by its origin. */
export const DRAFTED = {
  draft: "drafted",
  lookup: "looked up in the text before",
  grammar: "left no choice about by the schema",
};
const LONG = 512; // tokens in a block: what is out of sight is not laid out

export class TokenText {
  #root;
  #block = null;
  #tail = document.createTextNode("");
  #shown = 0;
  #characters = 0;
  #current = -1;
  #nodes = [];
  #onPick;
  #closing = new AbortController();

  /** `onPick(index)` is called with the token that is pointed at, or -1. */
  constructor(root, onPick = () => {}) {
    this.#root = root;
    this.#onPick = onPick;
    root.replaceChildren(this.#tail);
    const at = (event) => Number(event.target.closest?.("[data-i]")?.dataset.i ?? -1);
    const on = (type, listener) => root.addEventListener(type, listener, { signal: this.#closing.signal });
    on("pointerover", (event) => this.pick(at(event)));
    on("pointerleave", () => this.pick(-1));
    on("click", (event) => this.pick(at(event)));
    on("blur", () => this.pick(-1));
    on("keydown", (event) => {
      const moved = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      const ends = { Home: 0, End: this.#nodes.length - 1 }[event.key];
      if ((moved === undefined && ends === undefined) || !this.#nodes.length) return;
      event.preventDefault();
      const next = ends ?? Math.min(Math.max(this.#current + moved, 0), this.#nodes.length - 1);
      this.pick(next);
      this.#nodes[next].scrollIntoView({ block: "nearest" });
    });
  }

  /** Listens no more: the same place shows another answer from now on. */
  close() {
    this.#closing.abort();
  }

  /** Shows tokens up to `upTo`, and the end of `text` that has no token yet. */
  show(tokens, text, upTo = tokens.length) {
    if (upTo < this.#shown) this.clear();
    for (; this.#shown < upTo; this.#shown++) {
      this.#add(tokens[this.#shown], this.#shown);
      this.#characters += tokens[this.#shown].text.length;
    }
    const tail = text.slice(this.#characters);
    if (this.#tail.data !== tail) this.#tail.data = tail;
  }

  clear() {
    this.pick(-1);
    this.#nodes = [];
    this.#shown = this.#characters = 0;
    this.#block = null;
    this.#root.replaceChildren(this.#tail);
  }

  #add(token, index) {
    if (index % LONG === 0) {
      this.#block = document.createElement("span");
      this.#block.className = "block";
      this.#root.insertBefore(this.#block, this.#tail);
    }
    const mark = document.createElement("span");
    mark.className = classOf(token);
    mark.dataset.i = index;
    mark.dataset.step = token.step;
    mark.textContent = token.text;
    if (!token.text) mark.classList.add("empty");
    this.#block.append(mark);
    this.#nodes.push(mark);
  }

  pick(index) {
    if (index === this.#current) return;
    for (const node of this.#stepOf(this.#current)) node.classList.remove("same-step", "picked");
    this.#current = index;
    for (const node of this.#stepOf(index)) node.classList.add("same-step");
    this.#nodes[index]?.classList.add("picked");
    this.#onPick(index);
  }

  #stepOf(index) {
    const step = this.#nodes[index]?.dataset.step;
    if (step === undefined) return [];
    let first = index;
    while (this.#nodes[first - 1]?.dataset.step === step) first--;
    let end = index;
    while (this.#nodes[end]?.dataset.step === step) end++;
    return this.#nodes.slice(first, end);
  }
}

function classOf({ origin, position }) {
  if (origin === "target") return "t own";
  return origin === "draft" ? `t drafted draft p${Math.min(position, 4)}` : `t drafted ${origin}`;
}

export function describe(answer, index) {
  const token = answer.tokens[index];
  if (!token) return null;
  const step = answer.steps[token.step] ?? { drafted: 0, accepted: 0 };
  const name = token.text ? JSON.stringify(token.text) : "a token without text";
  const verified = step.drafted
    ? `which had ${step.drafted} drafted and ${step.accepted} accepted`
    : "which had no drafts";
  return token.origin === "target"
    ? `${name}: the target’s own, in step ${token.step + 1}, ${verified}`
    : `${name}: ${DRAFTED[token.origin]}, at position ${token.position}, and accepted in step ${token.step + 1}, ${verified}`;
}
