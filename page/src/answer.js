// One answer on its way: its text, its tokens with where they come from, and what it took.
import { stream } from "./api.js";
import { Store } from "./store.js";

export class Answer {
  constructor() {
    this.text = "";
    this.reasoning = "";
    this.tokens = [];
    this.steps = [];
    this.arrivals = []; // [milliseconds since the request, characters, tokens] so far
    this.metrics = null;
    this.usage = null;
    this.finish = null;
    this.problem = null;
    /** How far it is: `waiting`, `streaming`, `done`, `stopped` or `failed`. */
    this.status = new Store("waiting");
    this.changed = new Store(0);
    this.firstMs = null;
    this.totalMs = null;
  }

  /** How many tokens each origin has: `draft`, `lookup`, `grammar` and `target`. */
  get byOrigin() {
    const counts = { draft: 0, lookup: 0, grammar: 0, target: 0 };
    for (const token of this.tokens) counts[token.origin]++;
    return counts;
  }

  /** Tokens that were drafted, by whatever source. */
  get drafted() {
    return this.tokens.length - this.byOrigin.target;
  }

  get accepted() {
    return this.steps.reduce((sum, step) => sum + step.accepted, 0);
  }

  get proposed() {
    return this.steps.reduce((sum, step) => sum + step.drafted, 0);
  }

  /** Tokens per step that verified drafts; null where none did. */
  get acceptanceLength() {
    const verified = this.metrics?.num_spec_steps ?? this.steps.filter((step) => step.drafted).length;
    return verified ? 1 + (this.metrics?.num_accepted_draft_tokens ?? this.accepted) / verified : null;
  }

  /** Reasoning and text, as a lane of the race shows them and the verdict compares them. */
  get whole() {
    return this.reasoning + (this.reasoning && this.text ? "\n\n" : "") + this.text;
  }

  get count() {
    return this.usage?.completion_tokens ?? this.tokens.length;
  }

  /** Tokens per second after the first. */
  get speed() {
    const ms = (this.arrivals.at(-1)?.[0] ?? 0) - (this.firstMs ?? 0);
    return this.count > 1 && ms > 0 ? (1000 * (this.count - 1)) / ms : null;
  }

  async run(path, body, signal) {
    const began = performance.now();
    let ended = "done";
    try {
      await stream(path, { ...body, stream_options: { include_usage: true } }, {
        signal,
        onChunk: (chunk) => this.#take(chunk, performance.now() - began),
      });
    } catch (problem) {
      if (!signal?.aborted) this.problem = problem;
      ended = signal?.aborted ? "stopped" : "failed";
    }
    this.totalMs = performance.now() - began;
    this.#announce();
    this.status.set(ended);
  }

  #take(chunk, ms) {
    if (chunk.usage) this.usage = chunk.usage;
    if (chunk.metrics) this.metrics = chunk.metrics.speculative_decoding ?? null;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const text = choice.delta?.content ?? "";
    const reasoning = choice.delta?.reasoning ?? "";
    const told = choice.speculation;
    if (told) {
      this.tokens.push(...told.tokens);
      this.steps.push(...told.steps);
    }
    if (choice.finish_reason) this.finish = choice.finish_reason;
    if (!text && !reasoning && !told) return;
    this.text += text;
    this.reasoning += reasoning;
    this.firstMs ??= ms;
    this.arrivals.push([ms, this.whole.length, this.tokens.length]);
    if (this.status.value === "waiting") this.status.set("streaming");
    this.#announce();
  }

  #announce() {
    this.changed.set(this.changed.value + 1);
  }
}
