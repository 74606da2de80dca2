"""Target and head: compatible pairs pass, every mismatch is named. Tensors one by one are in
tests/drafters/model/test_head_check.py."""

from __future__ import annotations

import ast
import json
import re
import struct
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from app.doctor import models
from drafters.model.config import HeadConfig
from drafters.model.head_check import expected_tensors
from drafters.model.weight_files import StoredTensor


def stored(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, StoredTensor]:
    return {name: StoredTensor("BF16", shape, Path("x"), 0, 0) for name, shape in shapes.items()}


def whole(config: dict[str, Any]) -> dict[str, StoredTensor]:
    """All tensors of a head with this configuration."""
    read = HeadConfig.from_json(config, 24)
    return stored(expected_tensors(read, own_embeddings=True, own_lm_head=False))


TARGET = models.Checkpoint(
    folder="target",
    config={
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 8,
        "vocab_size": 100,
        "num_hidden_layers": 6,
        "max_position_embeddings": 512,
    },
    tensors=stored({"embed": (100, 8)}),
    files=frozenset({"tokenizer.json"}),
)
CONFIG = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "vocab_size": 100,
    "ptd_token_id": 3,
    "num_hidden_layers": 2,
    "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
}
HEAD = models.Checkpoint(folder="head", config=CONFIG, tensors=whole(CONFIG))


def changed(checkpoint: models.Checkpoint, **config: Any) -> models.Checkpoint:
    """The same checkpoint with other values in its config.json; None takes one out."""
    merged = {**checkpoint.config, **config}
    return replace(checkpoint, config={k: v for k, v in merged.items() if v is not None})


def test_a_matching_pair_passes() -> None:
    assert models.check_target(TARGET, 512).status == "ok"
    assert models.check_head(HEAD, TARGET, 5).status == "ok"


def test_nested_configurations_are_read() -> None:
    """Multimodal targets and heads from speculators nest the language model's values."""
    sizes = ("hidden_size", "vocab_size", "num_hidden_layers", "max_position_embeddings")
    nested = {name: TARGET.config[name] for name in sizes}
    target = replace(TARGET, config={"architectures": ["X"], "text_config": nested})
    names = ("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads")
    layer = {name: HEAD.config[name] for name in names} | {"num_hidden_layers": 2}
    library = {"speculators_model_type": "peagle", "mask_token_id": 3}
    taps = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}
    head = replace(HEAD, config={**library, **taps, "transformer_layer_config": layer})
    assert models.check_target(target, 513).status == "FAIL"
    assert models.check_head(head, target, 5).status == "ok"


@pytest.mark.parametrize(
    ("target", "max_model_len", "detail"),
    [
        (TARGET, 513, "--max-model-len 513"),
        (changed(TARGET, architectures=None), None, "names no architecture"),
        (replace(TARGET, tensors={}), None, "no *.safetensors"),
        (replace(TARGET, files=frozenset({"config.json"})), None, "no tokenizer"),
    ],
)
def test_a_target_that_cannot_be_served(
    target: models.Checkpoint, max_model_len: int | None, detail: str
) -> None:
    finding = models.check_target(target, max_model_len)
    assert finding.status == "FAIL"
    assert detail in finding.detail


@pytest.mark.parametrize(
    ("head", "detail"),
    [
        (changed(HEAD, target_hidden_size=16), "reads hidden size 16"),
        (changed(HEAD, hidden_size=16), "reads hidden size 16"),
        (changed(HEAD, vocab_size=90), "vocabulary 90"),
        (changed(HEAD, eagle_aux_hidden_state_layer_ids=[1, 3, 7]), "taps layer 7"),
        (
            changed(HEAD, eagle_aux_hidden_state_layer_ids=[1, 3]),
            "mask_hidden has the shape [1, 24], not [1, 16]",
        ),
        (changed(HEAD, ptd_token_id=None), "unknown mask_hidden (P-EAGLE heads have mask_hidden"),
        (changed(HEAD, ptd_token_id=100), "outside the vocabulary"),
        (changed(HEAD, parallel_drafting=False), "parallel_drafting"),
        (changed(HEAD, rope_scaling={"type": "default", "mrope_section": [1, 1, 2]}), "M-RoPE"),
        (changed(HEAD, draft_vocab_size=50), "lacks d2t, lm_head.weight, t2d (a draft vocabulary"),
        (
            replace(HEAD, tensors={n: t for n, t in HEAD.tensors.items() if n != "mask_hidden"}),
            "lacks mask_hidden (it drafts",
        ),
        (replace(HEAD, broken_values=("fc.weight has 1 values",)), "fc.weight has 1 values"),
        # Keys that nothing here computes are named, before an engine is made.
        (changed(HEAD, rope_scaling={"type": "dynamic", "factor": 2.0}), "rope_type 'dynamic'"),
        (changed(HEAD, eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state"),
        (changed(HEAD, architectures=["Eagle3DeepseekV2ForCausalLM"]), "Eagle3DeepseekV2"),
        (changed(HEAD, hidden_act="gelu"), "hidden_act"),
        # Vague taps: 6 layers are too few for vLLM's default of three.
        (changed(HEAD, eagle_aux_hidden_state_layer_ids=None), "ascending and distinct"),
    ],
)
def test_a_head_that_does_not_fit(head: models.Checkpoint, detail: str) -> None:
    finding = models.check_head(head, TARGET, 5)
    assert finding.status == "FAIL"
    assert detail in finding.detail


def test_a_target_with_m_rope_has_no_head() -> None:
    """The fault: doctor found nothing, and the start was refused."""
    rotations = {"rope_type": "default", "mrope_section": [1, 1, 2]}
    finding = models.check_head(HEAD, changed(TARGET, rope_parameters=rotations), 5)
    assert finding.status == "FAIL" and "M-RoPE" in finding.detail
    assert finding.remedy is not None and "or none: drafts by lookup" in finding.remedy


EAGLE_3 = replace(changed(HEAD, ptd_token_id=None), tensors=whole({**CONFIG, "ptd_token_id": None}))


def test_an_eagle_3_head_passes_and_is_called_so() -> None:
    for head in (EAGLE_3, replace(EAGLE_3, tensors={}, files=frozenset({"pytorch_model.bin"}))):
        finding = models.check_head(head, TARGET, 5)
        assert finding.status == "ok" and finding.detail.startswith("EAGLE-3, 2 layers")
    assert models.check_head(HEAD, TARGET, 5).detail.startswith("P-EAGLE, 2 layers")


def test_taps_that_a_head_does_not_name_are_told() -> None:
    deep = changed(TARGET, num_hidden_layers=24)
    silent = changed(EAGLE_3, eagle_aux_hidden_state_layer_ids=None)
    finding = models.check_head(silent, deep, 5)
    assert finding.status == "ok" and "default layers [2, 12, 21]" in finding.detail
    nested = changed(silent, eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 99]})
    assert "taps layer 99" in models.check_head(nested, deep, 5).detail


def test_more_drafts_than_trained_for_warns() -> None:
    finding = models.check_head(replace(HEAD, trained_k=8), TARGET, 9)
    assert finding.status == "warn"
    assert finding.remedy is not None
    assert finding.remedy.startswith("--k 8")


def test_a_folder_is_read_without_its_weights(tmp_path: Path) -> None:
    header = json.dumps(
        {
            "__metadata__": {"format": "pt"},
            "mask_hidden": {"dtype": "BF16", "shape": [1, 24], "data_offsets": [0, 48]},
        }
    ).encode()
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "provenance.json").write_text('{"k_train": 8}')
    (tmp_path / "model.safetensors").write_bytes(
        struct.pack("<Q", len(header)) + header + bytes(48)
    )
    checkpoint = models.read_checkpoint(tmp_path)
    [tensor] = checkpoint.tensors.values()
    assert (tensor.dtype, tensor.shape) == ("BF16", (1, 24))
    assert (tensor.offset, tensor.size) == (8 + len(header), 48)
    assert checkpoint.trained_k == 8
    assert checkpoint.weights_bytes == 8 + len(header) + 48


def test_all_that_does_not_fit_is_named() -> None:
    head = changed(HEAD, hidden_size=16, vocab_size=90, ptd_token_id=None)
    detail = models.check_head(head, TARGET, 5).detail
    for words in ("hidden size 16", "another model", "vocabulary 90", "unknown mask_hidden"):
        assert words in detail


@pytest.mark.parametrize(
    ("head", "settings", "detail", "remedy"),
    [
        (changed(HEAD, max_position_embeddings=256), {}, "256 positions", "long contexts"),
        (
            changed(HEAD, max_position_embeddings=256),
            {"max_model_len": 400},
            "requests may have 400",
            "--max-model-len 256",
        ),
        (changed(HEAD, dtype="float16"), {"dtype": "bfloat16"}, "stored in float16", "--dtype"),
        (HEAD, {"trained_k": 4}, "over the 4 that it was trained for", "--k 4"),
        (
            changed(HEAD, speculators_config={"verifier": {"name_or_path": "org/other"}}),
            {},
            "names org/other as its target",
            "lower acceptance",
        ),
    ],
)
def test_what_drafts_badly_warns(
    head: models.Checkpoint, settings: dict[str, Any], detail: str, remedy: str
) -> None:
    finding = models.check_head(head, TARGET, 5, **settings)
    assert finding.status == "warn"
    assert detail in finding.detail
    assert finding.remedy is not None and remedy in finding.remedy


@pytest.mark.parametrize(
    ("head", "settings"),
    [
        (changed(HEAD, max_position_embeddings=256), {"max_model_len": 256}),
        (changed(HEAD, dtype="bfloat16"), {"dtype": "float32"}),
        (changed(HEAD, speculators_config={"verifier": {"name_or_path": "me/target"}}), {}),
    ],
)
def test_what_drafts_well_does_not(head: models.Checkpoint, settings: dict[str, Any]) -> None:
    assert models.check_head(head, TARGET, 5, **settings).status == "ok"


def test_a_length_that_vllm_takes_is_not_refused() -> None:
    """The fault: Command-R was refused at more than its 8,192 `max_position_embeddings`."""
    longer = changed(TARGET, model_max_length=131072)
    assert models.check_target(longer, 32768).status == "ok"
    assert models.check_target(longer, 131073).status == "FAIL"


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("config.json", None, "has no config.json"),
        ("config.json", b"{", "config.json is not JSON"),
        ("config.json", b"\xff", "config.json is not JSON"),
        ("config.json", b"[" * 100_000, "config.json is not JSON"),
        ("config.json", b"[]", "config.json is not a JSON object"),
        ("provenance.json", b"3", "provenance.json is not a JSON object"),
    ],
)
def test_a_file_that_is_no_json_object_is_named(
    file: str, content: bytes | None, words: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        models.read_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["hidden_size", "vocab_size", "num_hidden_layers"])
@pytest.mark.parametrize("value", ["x", [1], {"a": 1}, 1.5])
def test_a_size_that_is_no_number_is_a_finding(name: str, value: Any) -> None:
    target = changed(TARGET, **{name: value})
    finding = models.check_target(target, 512)
    assert finding.status == "FAIL" and f"{name} {value!r}" in finding.detail
    models.check_head(HEAD, target, 5)  # says something, whatever it is


@pytest.mark.parametrize("names", ["LlamaForCausalLM", [None], [["x"]], 3, {}])
def test_architectures_that_are_no_names_are_none(names: Any) -> None:
    target = changed(TARGET, architectures=names)
    assert "names no architecture" in models.check_target(target, 512).detail
    assert not models.is_recurrent(target)


@pytest.mark.parametrize("taps", [3, True, 1.5, "x"])
def test_taps_that_are_no_list_are_a_finding(taps: Any) -> None:
    head = changed(HEAD, eagle_aux_hidden_state_layer_ids=taps)
    assert models.check_head(head, TARGET, 5).status == "FAIL"
    assert models.head_facts(head) is not None


@pytest.mark.parametrize(
    ("stored", "dtype", "factor"),
    [
        ({"dtype": "bfloat16"}, "auto", 1),
        ({"dtype": "bfloat16"}, "float32", 2),
        ({"torch_dtype": "float32"}, "bfloat16", 0.5),
        ({"dtype": "bfloat16", "quantization_config": {}}, "float32", 1),
    ],
)
def test_weights_count_in_the_type_that_they_are_loaded_in(
    stored: dict[str, Any], dtype: str, factor: float
) -> None:
    checkpoint = models.Checkpoint("folder", stored, weights_bytes=100)
    assert checkpoint.bytes_in(dtype) == 100 * factor


# A class and its bases, which may have brackets of their own.
CLASS = re.compile(r"^[ \t]*class (\w+)(?:\(([^()]*(?:\([^()]*\)[^()]*)*)\))?:", re.MULTILINE)


def test_the_classes_with_recurrent_layers_are_those_of_vllm() -> None:
    """Of those that generate text. Read from vLLM's source: each class would take an import."""
    vllm = find_spec("vllm")
    if vllm is None or vllm.origin is None:
        pytest.skip("vllm is not installed")
    folder = Path(vllm.origin).parent / "model_executor" / "models"
    bases: dict[str, set[str]] = {}
    for file in (*folder.rglob("*.py"), *(folder.parent.parent / "models").rglob("*.py")):
        for name, found in CLASS.findall(file.read_text("utf-8")):  # to parse them takes 16 s
            listed = (base.strip() for base in re.sub("#.*", "", found).split(","))
            bases.setdefault(name, set()).update(filter(None, listed))

    def is_hybrid(name: str) -> bool:
        return name == "IsHybrid" or any(map(is_hybrid, bases.get(name, set()) - {name}))

    tables = {
        target.id: ast.literal_eval(node.value)
        for node in ast.parse((folder / "registry.py").read_text("utf-8")).body
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Dict)
        for target in [node.targets[0] if isinstance(node, ast.Assign) else node.target]
        if isinstance(target, ast.Name)
        and target.id in ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS")
    }
    assert len(tables) == 2
    names = {
        name for table in tables.values() for name, (_, kind) in table.items() if is_hybrid(kind)
    }
    assert names == models.RECURRENT
