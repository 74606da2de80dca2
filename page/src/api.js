// Requests to the gateway, with the key of this tab, and their errors in words.
import { createParser } from "eventsource-parser";
import { Store } from "./store.js";

const KEY = "aerie-key";

/** `wanted`: the gateway has refused for want of a key, or of a right one. */
export const access = new Store({ key: sessionStorage.getItem(KEY) ?? "", wanted: false, refused: false });

export function useKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
  access.set({ key, wanted: false, refused: false });
}

export class Problem extends Error {
  constructor(message, { status = 0, code = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, code, retryAfter });
  }
}

export const PHASES = {
  starting: "The gateway is starting",
  restarting: "The engine was lost and is being started again",
  loading: "The model is being loaded",
  warming: "The engine is warming up",
  ready: "Ready",
  stopping: "The gateway is shutting down",
  failed: "The engine could not be started",
};

export const LOST = "The connection to the gateway was lost.";
export const CUT = "The connection was lost before the answer was complete. What had come is kept.";

const seconds = (n) => (n === 1 ? "1 second" : `${n} seconds`);

function inWords(status, error, retryAfter) {
  const message = error?.message ?? `The gateway answered with status ${status}.`;
  const wait = retryAfter ? ` Try again in ${seconds(retryAfter)}.` : "";
  if (status === 401) return "The gateway asks for an API key, or does not know this one.";
  if (error?.code === "admin_required") return "This key may look, but not steer: that needs an admin’s key.";
  if (status === 429) {
    if (/try again in/i.test(message)) return message;
    return `${message.replace(/;? try again later\.?$/i, ".").replace(/\.\.$/, ".")}${wait}`;
  }
  if (error?.code === "engine_not_ready") {
    const phase = /\((\w+)\)/.exec(message)?.[1];
    return `${PHASES[phase] ?? "The engine is not ready"}.${wait}`;
  }
  if (error?.code === "engine_lost") return `The engine was lost while it answered. It is started again.${wait}`;
  return `${message}${status === 503 ? wait : ""}`;
}

function problemOf(status, body, retryAfter) {
  const error = body?.error;
  return new Problem(inWords(status, error, retryAfter), { status, code: error?.code, retryAfter });
}

export async function request(path, { method = "GET", body, signal } = {}) {
  const headers = {};
  const { key } = access.value;
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method, headers, signal, body: body && JSON.stringify(body) });
  } catch (error) {
    if (signal?.aborted && error.name !== "TimeoutError") throw error;
    throw new Problem(LOST);
  }
  if (response.ok) return response;
  // Unless another key has been given since.
  if (response.status === 401 && access.value.key === key) access.update({ wanted: true, refused: Boolean(key) });
  const retryAfter = Math.ceil(Number(response.headers.get("retry-after"))) || null;
  throw problemOf(response.status, await response.json().catch(() => null), retryAfter);
}

/** Calls `onChunk` with the data of each event of an answer, until it is complete. */
export async function stream(path, body, { signal, onChunk }) {
  const response = await request(path, { method: "POST", body: { ...body, stream: true }, signal });
  let complete = false;
  let problem = null;
  const parser = createParser({
    onEvent({ data }) {
      if (data === "[DONE]") complete = true;
      else {
        const chunk = JSON.parse(data);
        if (chunk.error) problem ??= problemOf(response.status, chunk, null);
        else onChunk(chunk);
      }
    },
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      parser.feed(value);
      if (problem) throw problem;
    }
  } catch (error) {
    if (signal?.aborted || error instanceof Problem) throw error;
    throw new Problem(CUT);
  }
  if (!complete) throw new Problem(CUT);
}
