"""Model cards of the embedded models, from their provenance and the evaluation's table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

from drafters.train.provenance import read_provenance

_TARGET = """\
# aerie-embedded: the target

A Llama-architecture language model of {parameters:.1f} M parameters that runs anywhere, so that
the gateway can be tested without a download. {layers} layers of {hidden}, {heads} query and
{kv_heads} key-value head(s) of 64, byte-level BPE of 8,192 entries, tied embeddings, context
{context}, bf16, {size:.1f} MiB.

- Data: the source of the Python {python} standard library (PSF-2.0), deduplicated, less a
  held-out 3% of the files chosen by the hash of their path; and chat turns derived mechanically
  from it (docstring to code, code to docstring, code to its continuation). Data hash
  `{data_sha256}`.
- Training: {tokens} tokens in {steps} steps, {minutes} minutes on {threads} CPU thread(s)
  with bf16 matrix units; Muon and AdamW. `provenance.json` has the command and versions.
- Loss: {train_loss:.2f} nats a token in training, {held_out_loss:.2f} on held-out files and chats.
- Chat format: ChatML; tools and tool calls in the Hermes form (`chat_template.jinja`).

## What it is not for

Answers. It writes text that looks like Python or like its documentation and knows nothing;
it was not trained to call tools. Use it to test the gateway and the drafters, not to measure
them: what drafts gain on it says nothing about another model.
"""

_HEAD = """\
# aerie-embedded: the {title} head

{about}
{parameters:.1f} M parameters; matrices are stored in 8 bits (float8_e4m3fn, {size:.1f} MiB).
vLLM 0.32 loads it as it is:
`--speculative-config '{{"method": "eagle3", "model": "models/embedded/{name}",
"num_speculative_tokens": {serve_k}{parallel}}}'`.

- Data: {rows} continuations that the target itself wrote (70% greedy, 30% at temperature 0.7)
  after prompts from its training files. Licence of the underlying text: PSF-2.0.
- Training: {tokens} anchors in {steps} steps, {minutes} minutes on {threads} CPU thread(s);
  K = {k_train}, COD with r = {retain}, cross-entropy, Muon and AdamW. `provenance.json` has the
  commands. {sibling}
- Loss per depth, nats: {losses}.

## Acceptance on held-out prompts

Greedy; acceptance length in tokens per target step, bonus token included; positions are the
share of all steps that accepted them; ± is half of the 95% interval over prompts. As printed by
`aerie evaluate --target models/embedded/target --head models/embedded/{name}
--workload stdlib-code,stdlib-chat --count 200`:

{table}

`stdlib-code` continues held-out files of the standard library, `stdlib-chat` answers questions
derived from them. The target is small and repeats itself more than a large model does, which
raises these figures: they say nothing about heads of other targets.

## What it is not for

Any other target. A head predicts one model's text from that model's hidden states.
"""

_ABOUT = {
    "p-eagle": """\
A parallel draft head (P-EAGLE, arXiv 2602.01469) for the model in `../target`: {layers} decoder
layers of {hidden}, three taps of the target (the residual stream after layers {taps}), a learned
shared hidden state and a mask token for the masked slots, trainable embeddings; the output matrix
is the target's own and not in the file.""",
    "eagle3": """\
A sequential draft head (EAGLE-3, arXiv 2503.01840) for the model in `../target`, here for
comparison with the parallel one beside it: {layers} decoder layer of {hidden}, the same three
taps (the residual stream after layers {taps}); embeddings and output matrix are the target's own
and not in the file.""",
}
_HEADS = {
    "p-eagle": {
        "title": "P-EAGLE",
        "serve_k": 5,
        "parallel": ', "parallel_drafting": true',
        "sibling": "",
    },
    "eagle3": {
        "title": "EAGLE-3",
        "serve_k": 3,
        "parallel": "",
        "sibling": "The P-EAGLE head beside it had {rows} continuations, {tokens} anchors.",
    },
}


def write_cards(folder: Path, tables: Mapping[str, str]) -> None:
    """Write README.md beside the target and each head of `tables` in `folder`."""
    (folder / "target" / "README.md").write_text(_TARGET.format(**_facts(folder / "target")))
    for name, table in tables.items():
        place = folder / name
        facts = {**_facts(place), **_HEADS[name], "name": name, "table": table}
        facts["sibling"] = str(facts["sibling"]).format(**_facts(folder / "p-eagle"))
        card = _HEAD.format(about=_ABOUT[name].format(**facts), **facts)
        (place / "README.md").write_text(card)


def _facts(place: Path) -> dict[str, Any]:
    """Figures from config, provenance and file size, by the names that the cards use."""
    config = json.loads((place / "config.json").read_text())
    facts = read_provenance(place) or {}
    weights = place / "model.safetensors"
    with safe_open(weights, framework="pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    return {
        **facts,
        "python": ".".join(str(facts["python"]).split(".")[:2]),
        "parameters": sum(map(math.prod, shapes)) / 1e6,
        "size": weights.stat().st_size / 2**20,
        **{name: _sum(facts, name) for name in ("rows", "tokens", "steps", "minutes")},
        "context": config["max_position_embeddings"],
        "layers": config["num_hidden_layers"],
        "hidden": config["hidden_size"],
        "heads": config["num_attention_heads"],
        "kv_heads": config["num_key_value_heads"],
        "taps": ", ".join(map(str, config.get("eagle_aux_hidden_state_layer_ids", []))),
        "losses": " ".join(f"{loss:.2f}" for loss in facts.get("loss_per_depth", [])),
    }


def _sum(facts: Mapping[str, Any] | None, name: str) -> str:
    """A figure of this run and those that it continued, oldest first: `1,000 + 2,000`."""
    figures = []
    while facts is not None and name in facts:
        figures.append(f"{facts[name]:,}")
        facts = facts.get("init")
    return " + ".join(reversed(figures))
