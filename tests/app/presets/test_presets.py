"""Every preset loads, names parsers that vLLM has, and says what it needs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from app.cli import main
from app.commands.models import describe
from app.errors import SettingsError
from app.presets.about import About, HeadFacts, about_preset, facts_for, facts_in
from app.presets.memory import QUANTISED, graphs, need
from app.settings import REPOSITORY, load, of_preset, preset_names

NAMES = preset_names()
DOCS = REPOSITORY / "docs" / "models.md"
ON_A_CPU = {"embedded", "smollm2-135m"}  # no table of GPUs for these


def test_the_launch_models_are_there() -> None:
    assert {"gpt-oss-20b", "gpt-oss-120b", "qwen3-coder-30b", "gemma-4-31b"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_whole(name: str) -> None:
    settings, about = of_preset(name), about_preset(name)
    assert settings.model.model
    assert about.notes and about.serve_k
    low, high = about.serve_k
    assert low <= settings.speculation.k <= high
    assert about.trained_k is None or high <= about.trained_k
    if name == "embedded":
        return
    assert settings.speculation.drafter or name == "gemma-4-31b"
    # vLLM's own default (1,024 on a large GPU) would keep gigabytes of hidden states.
    assert settings.engine.max_num_seqs == 128
    assert about.target and about.head
    assert (
        settings.engine.max_model_len and settings.engine.max_model_len <= about.target.max_length
    )


@pytest.mark.parametrize("name", NAMES)
def test_parsers_are_vllms(name: str) -> None:
    pytest.importorskip("vllm", reason="vllm is not installed")
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    model = of_preset(name).model
    # A target without one says why, or its users' tools are refused by an oversight.
    assert model.tool_call_parser or any(
        "no tool parser" in note for note in about_preset(name).notes
    )
    if model.tool_call_parser:
        assert model.tool_call_parser in ToolParserManager.list_registered()
    if model.reasoning_parser:
        assert model.reasoning_parser in ReasoningParserManager.list_registered()


@pytest.mark.parametrize("name", NAMES)
def test_a_quantisation_is_one_that_vllm_does_while_it_loads(name: str) -> None:
    """The presets name weights in bfloat16. vLLM's `fp8` takes only those that are FP8 already, and
    stops the start otherwise."""
    quantization = of_preset(name).model.quantization
    if quantization is None:
        return
    assert quantization in QUANTISED
    pytest.importorskip("vllm", reason="vllm is not installed")
    from vllm.config.quantization import resolve_quantization_config

    assert resolve_quantization_config(quantization, None) is not None


def test_a_long_context_preset_differs_in_its_head_and_length_only() -> None:
    base, long = of_preset("gpt-oss-20b"), of_preset("gpt-oss-20b-long-context")
    assert long.speculation.drafter != base.speculation.drafter
    assert long.engine.max_model_len == about_preset("gpt-oss-20b-long-context").target.max_length  # type: ignore[union-attr]
    assert long.model == base.model
    assert long.speculation.k == base.speculation.k
    assert about_preset("gpt-oss-20b-long-context").target == about_preset("gpt-oss-20b").target


def test_gemma_is_served_without_a_head() -> None:
    settings = load({}, {}, preset="gemma-4-31b")
    assert settings.speculates and not settings.has_head
    with pytest.raises(SettingsError, match=r"no head is given for google/gemma-4-31B-it"):
        load({"lookup_k": "0"}, {}, preset="gemma-4-31b")
    assert not load({"k": "0"}, {}, preset="gemma-4-31b").speculates
    assert load({"drafter": "./head"}, {}, preset="gemma-4-31b").has_head


def test_a_file_builds_on_a_preset(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text(
        'preset = "gpt-oss-20b"\n[model]\nmodel = "me/my-20b"\n'
        "[about]\ntrained_k = 6\n[server]\nport = 9000\n"
    )
    settings = load({}, {}, preset=str(mine))
    assert settings.model.model == "me/my-20b"
    assert settings.model.tool_call_parser == "openai"
    assert settings.speculation.drafter == "amazon/GPT-OSS-20B-P-EAGLE"
    assert settings.server.port == 9000
    about = facts_for(settings, str(mine))
    assert about is not None
    assert (about.trained_k, about.serve_k) == (6, (3, 7))
    assert facts_for(settings) is None  # none of ours serves that model


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ('preset = "mine.toml"\n', "preset"),
        ('preset = "nope"\n', "preset"),
        ("[about]\nnote = 1\n", "about.note"),
        ("[about.target]\nlayers = 1\n", "about.target.parameters_b"),
        ("[model]\nmodle = 1\n", "model.modle"),
    ],
)
def test_what_is_wrong_in_a_preset_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, key: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.toml").write_text(text)
    with pytest.raises(SettingsError) as caught:
        about_preset("mine.toml")
    assert caught.value.key == key


def test_a_config_file_has_no_about(tmp_path: Path) -> None:
    file = tmp_path / "aerie.toml"
    file.write_text("[about]\ntrained_k = 6\n")
    with pytest.raises(SettingsError, match="about"):
        load({}, {}, config_file=str(file))


def test_facts_come_from_a_configuration() -> None:
    """As transformers writes those of hybrid models."""
    gpt_oss = {
        "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 64, "hidden_size": 256, "max_position_embeddings": 1024,
        "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 2,
    }  # fmt: skip
    facts = facts_in(gpt_oss, 2 * 1024**3)
    assert facts is not None
    assert [(g.layers, g.heads, g.head_dim, g.window) for g in facts.kv] == [
        (2, 2, 64, None),
        (2, 2, 64, 128),
    ]
    assert facts.parameters_b == pytest.approx(1024**3 / 1e9)
    # vLLM loads float32 in two bytes, and quantised weights as they are stored.
    stored = facts_in({**gpt_oss, "dtype": "float32"}, 4 * 1024**3)
    assert stored is not None and stored.parameters_b == facts.parameters_b
    stored = facts_in({**gpt_oss, "quantization_config": {}}, 2 * 1024**3)
    assert stored is not None and stored.weights_gib == 2
    gemma = {**gpt_oss, "num_global_key_value_heads": 1, "global_head_dim": 128}
    facts = facts_in(gemma, 1)
    assert facts is not None and (facts.kv[0].heads, facts.kv[0].head_dim) == (1, 128)
    assert facts_in({"model_type": "mamba"}, 1) is None


HYBRID = {
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "hidden_size": 256,
    "max_position_embeddings": 1024, "num_hidden_layers": 9,
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "layers", "written"),
    [
        ("jamba", 2, {"attn_layer_period": 4, "attn_layer_offset": 2}),
        ("nemotron_h", 2, {"hybrid_override_pattern": "M-M*-ME*-"}),
        ("qwen3_next", 3, {"full_attention_interval": 3}),
        ("lfm2", 2, {"full_attn_idxs": [2, 5]}),
        ("granitemoehybrid", 1, {"layer_types": ["mamba"] * 8 + ["attention"]}),
        ("zamba2", 3, {"layers_block_type": ["mamba", "mamba", "hybrid"] * 3}),
        (None, 3, {"layer_group_size": 4}),
        (None, 2, {"linear_attn_config": {"kda_layers": [1, 2, 3, 5, 6, 7, 9]}}),
        (None, 9, {}),
    ],
)
def test_only_layers_of_attention_have_a_kv_cache(
    kind: str | None, layers: int, written: dict[str, Any]
) -> None:
    """However a hybrid model's configuration says which they are; transformers reads it alike."""
    facts = facts_in({**HYBRID, **written}, 1)
    assert facts is not None
    assert [(group.layers, group.window) for group in facts.kv] == [(layers, None)]
    assert facts.layers == HYBRID["num_hidden_layers"]
    assert facts.recurrent == (layers < 9)
    needed = need(load({"model": "a/b"}, {}), About(target=facts))
    assert needed is not None
    assert ("; states of recurrent layers not counted)" in needed.sum()) == facts.recurrent
    if kind is not None:
        from transformers import AutoConfig

        theirs = AutoConfig.for_model(kind, **{"num_hidden_layers": 9, **written}).layer_types
        assert sum(each in ("full_attention", "hybrid") for each in theirs) == layers


def test_chunked_layers_keep_every_token() -> None:
    """The fault: of a Llama 4 that names the kinds of its layers only the full ones were counted.
    vLLM keeps all tokens of the others too, unless an environment variable asks it not to."""
    llama = {
        **HYBRID, "layer_types": ["chunked_attention"] * 6 + ["full_attention"] * 3,
        "attention_chunk_size": 128,
    }  # fmt: skip
    facts = facts_in(llama, 1)
    assert facts is not None and not facts.recurrent
    assert [(group.layers, group.window) for group in facts.kv] == [(9, None)]


@pytest.mark.parametrize(
    "written",
    [{"num_attention_heads": 0}, {"linear_attn_config": [1]}, {"full_attention_interval": "x"}],
)
def test_nothing_is_said_of_a_configuration_that_cannot_be_right(written: dict[str, Any]) -> None:
    known = {key: value for key, value in HYBRID.items() if key != "head_dim"}
    assert facts_in({**known, **written}, 1) is None


def test_a_target_without_attention_has_no_kv_cache() -> None:
    about = About(
        target=facts_in({**HYBRID, "hybrid_override_pattern": "M-M-M-M-M"}, 1),
        head=HeadFacts(parameters_b=0.1, layers=1),
    )
    needed = need(load({"model": "a/b", "drafter": "a/c"}, {}), about)
    assert needed is not None and needed.kv == 0


@pytest.mark.parametrize(
    ("written", "length"),
    [
        ({}, 1024),
        ({"model_max_length": 8192}, 8192),  # Command-R, Kimi Linear
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 4096),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 1024),
        ({"rope_scaling": {"rope_type": "linear", "factor": 8}, "model_type": "gemma3_text"}, 1024),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, 1024),
    ],
)
def test_the_longest_sequence_is_the_one_that_vllm_takes(
    written: dict[str, Any], length: int
) -> None:
    facts = facts_in({**HYBRID, **written}, 1)
    assert facts is not None and facts.max_length == length


def test_the_graphs_of_a_hybrid_model_are_those_of_all_its_layers() -> None:
    settings = load({"model": "a/b", "drafter": "a/c", "k": 3}, {})
    head = HeadFacts(parameters_b=0.1, layers=1)
    found = [
        graphs(settings, About(target=facts_in({**HYBRID, **written}, 1), head=head))
        for written in ({}, {"attn_layer_period": 4, "attn_layer_offset": 2})
    ]
    assert found[0] is not None
    assert found[0] == found[1]


def test_the_table_has_a_line_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1 : 1 + len(NAMES)]] == NAMES
    assert main(["models", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert [entry["preset"] for entry in entries] == NAMES


def test_a_page_shows_sum_and_notes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "gpt-oss-20b"]) == 0
    page = capsys.readouterr().out
    needed = need(of_preset("gpt-oss-20b"), about_preset("gpt-oss-20b"))
    assert needed is not None and needed.sum() in page
    assert "24 GB (L4, A10G): 2, " in page
    assert all(note in page for note in about_preset("gpt-oss-20b").notes)
    assert main(["models", "nope"]) == 2


@pytest.mark.parametrize("name", NAMES)
def test_the_docs_say_what_the_command_says(name: str) -> None:
    (row,) = re.findall(rf"^\| `{name}` \|(.*)\|$", DOCS.read_text("utf-8"), re.MULTILINE)
    _, head, k, length, memory, gpus = (cell.strip() for cell in row.split("|"))
    settings, found = of_preset(name), describe(name)
    low, high = found["serve_k"]
    assert k == f"{found['k']}, {low} to {high}, {found['trained_k'] or '-'}"
    if name in ON_A_CPU:
        return
    assert length == f"{settings.engine.max_model_len:,}"
    assert memory.removesuffix(" GiB") == f"{found['memory_gib']:.1f}"
    assert gpus == str(found["gpus"]["80"])
    assert head.startswith(settings.speculation.drafter or "none public")


def test_a_gpu_has_less_than_its_name_says() -> None:
    """An L4 of "24 GB" reports 22.5 GiB: what fits 24 x 0.92 need not start there."""
    needed = need(of_preset("gpt-oss-20b"), about_preset("gpt-oss-20b"))
    assert needed is not None and 22.5 * 0.92 < needed.total < 24 * 0.92
    assert describe("gpt-oss-20b")["gpus"]["24"] == 2
