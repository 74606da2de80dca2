// Markdown of a model, which may be hostile: raw HTML stays text, and what is left is cleaned again.
import DOMPurify from "dompurify";
import { Marked } from "marked";

const MOST_CHARACTERS = 60_000;
const LONGEST_WORD = 4_000; // beyond it, patterns of a parser take longer than anybody waits

const escape = (text) => text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text }) => escape(text),
    image: ({ text, href }) => escape(text || href), // nothing is loaded from anywhere
  },
});

const ALLOWED = {
  ALLOWED_TAGS: [
    ..."a b blockquote br code del em h1 h2 h3 h4 h5 h6 hr i li ol p pre s span strong sub sup".split(" "),
    ..."table tbody td th thead tr ul".split(" "),
  ],
  ALLOWED_ATTR: ["href", "start", "align", "class"],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  RETURN_DOM_FRAGMENT: true,
};

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("rel", "noopener noreferrer nofollow");
    node.setAttribute("target", "_blank");
  }
});

export function renderMarkdown(element, text) {
  if (text.length > MOST_CHARACTERS || new RegExp(`\\S{${LONGEST_WORD}}`).test(text)) {
    element.textContent = text;
    element.classList.add("plain");
    return;
  }
  element.classList.remove("plain");
  const fragment = DOMPurify.sanitize(marked.parse(text), ALLOWED);
  for (const block of fragment.querySelectorAll("pre")) withCopy(block);
  for (const table of fragment.querySelectorAll("table")) {
    const box = document.createElement("div");
    box.className = "scrolled";
    box.tabIndex = 0;
    table.replaceWith(box);
    box.append(table);
  }
  element.replaceChildren(fragment);
}

function withCopy(block) {
  const code = block.querySelector("code");
  const language = /language-(\S+)/.exec(code?.className ?? "")?.[1];
  const figure = document.createElement("div");
  figure.className = "code";
  const bar = document.createElement("div");
  bar.className = "code-bar";
  const label = document.createElement("span");
  label.textContent = language ?? "code";
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet";
  button.textContent = "Copy";
  button.addEventListener("click", async () => {
    button.textContent = (await copy(block.textContent)) ? "Copied" : "Not copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
  bar.append(label, button);
  block.tabIndex = 0;
  block.replaceWith(figure);
  figure.append(bar, block);
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return false;
  }
}
