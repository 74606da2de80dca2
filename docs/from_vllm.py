"""Write docs/from-vllm.md from app/commands/vllm_options.py: python -m docs.from_vllm"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from app.admission.controller import EXTRA_SLOTS_SHARE
from app.commands.vllm_options import CANNOT_WORK, NO_EFFECT, SETTINGS
from app.engine.configuration.capacity import DRAFTING_SEQUENCES, server_defaults
from app.settings import of_preset

PAGE = Path(__file__).with_name("from-vllm.md")
TEXT = """\
# Coming from `vllm serve`

Made from `app/commands/vllm_options.py` by `python -m docs.from_vllm`; a test keeps it so, and
tries every option of vLLM 0.32.

    aerie serve MODEL --speculative-config '{{"method": "eagle3", "model": "HEAD", \
"num_speculative_tokens": 5, "parallel_drafting": true}}'
    aerie serve MODEL --drafter HEAD --k 5        # the same
    aerie serve MODEL                             # no head: drafts by lookup
    aerie serve MODEL --k 0                       # no drafts
    aerie serve --config vllm.yaml --drafter HEAD # vLLM's file of options

Without a head `aerie serve MODEL` drafts by lookup in each request's own text
([models.md](models.md#serve-your-own-model)). The `method` of `--speculative-config` must be
`eagle3` or `peagle`; `mtp`, `draft_model` and others are refused, and so is `ngram`, for which
there is `--lookup-k`. `num_speculative_tokens` is the largest [K](glossary.md#k) of a head here;
`--objective fixed` always drafts that many, as vLLM does.

`aerie serve` takes the command line of `vllm serve`. vLLM's own parser reads the options that Aerie
does not have itself, with underscores, short names (`-tp 2`) and parts of JSON
(`--compilation-config.mode 3`). It reads `--config FILE.yaml` too; options of the command line and
AERIE_ variables override the file. `aerie serve --help` begins with what is needed most, and gives
choices, bounds, defaults and environment variables.

SageMaker's `SM_VLLM_*` variables are the same options ([sagemaker.md](sagemaker.md)).
[api.md](api.md#what-differs-from-the-server-inside-vllm) says what differs in the answers.
`aerie doctor` takes the same options, and says among other things whether the chat template shows
tools to the model and whether its calls are read.

## Before the load moves

- **Requests at once.** On a GPU of 70 GiB or more vLLM's own server runs {theirs:,} sequences at
  once, and any number may wait. Here presets run {preset}, and without a preset a server that
  drafts runs {drafting} at most: each sequence has K + 1 rows of logits ([gpu.md](gpu.md)). An
  eighth more are admitted and as many again may wait, an eighth of them once an overload lasts.
  The others get a 429 with `Retry-After`: with a preset the {refused_client}th client of a burst.
  For more at once set `--max-num-seqs`, for a longer queue `--max-waiting`.
- **Prefix cache.** With keys, each tenant has entries of its own. A prompt that several tenants
  send is read once for each of them, so that hits may be fewer than before. Keys of one tenant
  share, as does everybody behind one `--api-key`. Tenants that trust each other share with
  `--share-prefix-cache` ([security.md](security.md#isolation-of-tenants)).

## Options that work

| vLLM's option | here |
|---|---|
| `--speculative-config`, `-sc`, `--spec-method`, `--spec-model`, `--spec-tokens` | \
head and K; P-EAGLE and EAGLE-3 heads, K is chosen at every step |
| `--served-model-name A B` | requests may name any of them; answers and metrics have the first |
| `--api-key KEY` | \
one key, also from VLLM_API_KEY; several keys and quotas are `--keys-file`'s \
([security.md](security.md)) |
| `--enable-auto-tool-choice` | not needed: `--tool-call-parser` alone is enough |
| `--root-path /llm` | for proxies that take the prefix off \
and for those that leave it on; the page at `/` works without a prefix only |
| {same} | the setting of this name |
{renamed}
| all other options of the engine (`--kv-cache-dtype fp8`) | \
handed on; the same as `--engine-args '{{"kv_cache_dtype": "fp8"}}'` |

## Options that change nothing

| vLLM's option | why |
|---|---|
{no_effect}

## Options that are refused

By name, before anything is loaded, with the reason. `--no-OPTION` is taken.

| vLLM's option | reason |
|---|---|
{refused}
"""
SHOWN = {"served_model_name", "api_key", "root_path", "model_tag"}  # in TEXT


def page() -> str:
    """The page as it should be."""
    same = [name for name, setting in SETTINGS.items() if name == setting and name not in SHOWN]
    renamed = {
        name: f"`{_option(setting)}`"
        for name, setting in SETTINGS.items()
        if name != setting and name not in SHOWN
    }
    sequences = of_preset("qwen3-8b").engine.max_num_seqs
    assert sequences is not None
    admitted = math.ceil(sequences * (1 + EXTRA_SLOTS_SHARE))
    return TEXT.format(
        theirs=server_defaults(80).sequences,
        preset=sequences,
        drafting=DRAFTING_SEQUENCES,
        refused_client=2 * admitted + 1,
        same=_options(same),
        renamed=_rows(renamed),
        no_effect=_rows(NO_EFFECT),
        refused=_rows(CANNOT_WORK),
    )


def _rows(texts: Mapping[str, str]) -> str:
    """One row for all options with the same text."""
    by_text: dict[str, list[str]] = {}
    for name, text in texts.items():
        by_text.setdefault(text, []).append(name)
    return "\n".join(f"| {_options(names)} | {text} |" for text, names in by_text.items())


def _options(names: list[str]) -> str:
    return ", ".join(f"`{_option(name)}`" for name in names)


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
    print(PAGE)
