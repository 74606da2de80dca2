"""The table of request fields, and the OpenAPI document and the page that are made of it."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_params
from anthropic.types.beta import message_create_params as beta_create_params
from openai.types import completion_create_params as text_create_params
from openai.types.chat import completion_create_params
from openai.types.responses import input_token_count_params, response_create_params
from vllm.sampling_params import BeamSearchParams, SamplingParams

from app.endpoints import declared
from app.errors import ApiError
from app.serving.request_models import ChatRequest, TextRequest
from app.serving.schemas import request_schemas
from app.validation import fields
from app.validation.fields import NotAt, OnlyAt, SameAs, WithoutEffect
from docs.fields import PAGE, page

# Parameters of the SDKs that would change an answer or cannot be kept here: unknown, so a 400.
_BETA = {"billing_policy", "compaction", "fallback_credit_token", "fallbacks", "thread"}
_HEADERS = {"betas", "workspace_id"}  # the client sends these beside the body
SDK_PARAMETERS = [
    ("chat", completion_create_params.CompletionCreateParamsBase, set()),
    ("completions", text_create_params.CompletionCreateParamsBase, set()),
    ("responses", response_create_params.ResponseCreateParamsBase, set()),
    ("input_tokens", input_token_count_params.InputTokenCountParams, set()),
    ("messages", message_create_params.MessageCreateParamsBase, _HEADERS),
    ("messages", beta_create_params.MessageCreateParamsBase, _HEADERS | _BETA),
    ("count_tokens", message_count_tokens_params.MessageCountTokensParams, _HEADERS),
    ("count_tokens", beta_count_params.MessageCountTokensParams, _HEADERS | _BETA),
]
FIELDS = {endpoint.name: endpoint.fields for endpoint in declared()}
RULES = [(dialect, name) for dialect, rules in FIELDS.items() for name in rules]


@pytest.mark.parametrize(("dialect", "name"), RULES)
def test_every_rule_is_kept(dialect: str, name: str) -> None:
    rule = FIELDS[dialect][name]
    if isinstance(rule, NotAt):
        wrong: Any = rule.values[0]
    else:
        wrong = object() if isinstance(rule, OnlyAt) else {str: 5, int: True}.get(rule.kind, "x")
    with pytest.raises(ApiError) as caught:
        fields.check_fields({name: wrong}, {name}, FIELDS[dialect])
    assert (caught.value.status, caught.value.param) == (400, name)
    if isinstance(rule, NotAt):
        assert rule.why in caught.value.message
        for honoured in (0, False):
            payload = {name: honoured}
            fields.check_fields(payload, {name}, FIELDS[dialect])
            assert payload == {name: honoured}
        with pytest.raises(ApiError, match="Unrecognized"):
            fields.check_fields({name: 0}, (), FIELDS[dialect])
    elif isinstance(rule, OnlyAt):
        assert rule.why in caught.value.message
        for harmless in rule.values:
            payload = {name: harmless}
            fields.check_fields(payload, {name}, FIELDS[dialect])
            assert payload == {}


@pytest.mark.parametrize(("dialect", "parameters", "refused"), SDK_PARAMETERS)
def test_every_parameter_of_an_sdk_is_known_or_listed_as_refused(
    dialect: str, parameters: type, refused: set[str]
) -> None:
    endpoint = next(endpoint for endpoint in declared() if endpoint.name == dialect)
    known = {*endpoint.models()[0].model_fields, *endpoint.fields}
    assert set(get_type_hints(parameters)) - known - {"stream"} <= refused
    assert not refused & known


@pytest.mark.parametrize("dialect", FIELDS)
@pytest.mark.parametrize(
    "name", ["kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode"]
)
def test_what_the_engine_reads_for_itself_passes_in_no_way(dialect: str, name: str) -> None:
    payload = {"vllm_xargs": {name: "x"}}
    with pytest.raises(ApiError) as caught:
        fields.check_fields(payload, {"vllm_xargs"}, FIELDS[dialect])
    assert (caught.value.status, caught.value.param) == (400, f"vllm_xargs.{name}")
    fields.check_fields({"vllm_xargs": {"mine": "x"}}, {"vllm_xargs"}, FIELDS[dialect])


def test_a_second_name_counts() -> None:
    payload = {"max_tokens": 5, "max_completion_tokens": 2}
    fields.check_fields(payload, {"max_tokens"}, FIELDS["completions"])
    fields.rename(payload, FIELDS["completions"])
    assert payload == {"max_tokens": 2}


def test_false_is_no_zero() -> None:
    with pytest.raises(ApiError):
        fields.check_fields({"best_of": True}, (), FIELDS["chat"])
    fields.check_fields({"best_of": 1.0}, (), FIELDS["chat"])


@pytest.mark.parametrize("name", fields.NOT_WITH_BEAMS)
def test_a_beam_search_is_refused_beside_what_it_would_ignore(name: str) -> None:
    values = fields.NOT_WITH_BEAMS[name]
    fields.check_beam_search({name: 0.5})
    for harmless in (None, *values):
        fields.check_beam_search({"use_beam_search": True, name: harmless})
    with pytest.raises(ApiError, match=f"'{name}', 'vllm_xargs.mine'") as caught:
        fields.check_beam_search(
            {"use_beam_search": True, name: 0.5, "vllm_xargs": {"mine": 1}, "temperature": 0.5}
        )
    assert (caught.value.status, caught.value.param) == (400, "use_beam_search")


def test_a_beam_search_takes_tools_and_refuses_strict_ones() -> None:
    """Nothing holds a beam to a schema, but calls are read out of its text."""
    lax, strict = ({"type": "function", "function": {"name": "f", **more}} for more in
                   ({"strict": False}, {"strict": True}))  # fmt: skip
    search = {"use_beam_search": True, "tool_choice": "auto"}
    fields.check_beam_search({**search, "tools": [lax]})
    with pytest.raises(ApiError, match=r"'tools\[1\]\.function\.strict'") as caught:
        fields.check_beam_search({**search, "tools": [lax, strict]})
    assert caught.value.param == "use_beam_search"
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        with pytest.raises(ApiError, match="'tool_choice'"):
            fields.check_beam_search({**search, "tools": [lax], "tool_choice": choice})


@pytest.mark.parametrize("model", [ChatRequest, TextRequest])
def test_every_parameter_that_no_beam_search_has_is_refused_beside_it(model: Any) -> None:
    """The form of the answer and its log probabilities are made without the engine."""
    kept = {"n", "logprobs", "stream_interval", "logprob_token_ids"}
    sampled = {*SamplingParams.__struct_fields__, "response_format", "tool_choice"} - kept
    searched = {*BeamSearchParams.__struct_fields__} - {"structured_outputs"}
    assert {*model.model_fields} & sampled - searched <= fields.NOT_WITH_BEAMS.keys()


@pytest.mark.parametrize("name", ["logprobs", "top_logprobs"])
def test_a_beam_search_has_twice_as_many_alternatives_as_beams(name: str) -> None:
    fields.check_beam_search({"use_beam_search": True, "n": 3, name: 6})
    with pytest.raises(ApiError) as caught:
        fields.check_beam_search({"use_beam_search": True, name: 3})
    assert caught.value.param == name


@pytest.mark.parametrize("search", [{}, {"use_beam_search": False}])
def test_what_only_a_beam_search_has_is_refused_without_one(search: dict[str, Any]) -> None:
    for harmless in (None, 1, 1.0):
        fields.check_beam_search({**search, "length_penalty": harmless})
    with pytest.raises(ApiError, match="only a beam search") as caught:
        fields.check_beam_search({**search, "length_penalty": 0.5})
    assert (caught.value.status, caught.value.param) == (400, "length_penalty")
    fields.check_beam_search({"use_beam_search": True, "length_penalty": 0.5})


@pytest.mark.parametrize("dialect", ["chat", "completions", "responses"])
def test_what_would_be_ignored_is_not_called_honoured(dialect: str) -> None:
    """vLLM takes -1 for no seed, a watermark without a configuration for none, and a session for a
    label."""
    for field in ({"seed": -1}, {"watermarking": True}):
        with pytest.raises(ApiError) as caught:
            fields.check_fields(dict(field), field, FIELDS[dialect])
        assert caught.value.param in field
    fields.check_fields(
        {"seed": -2, "watermarking": False}, ("seed", "watermarking"), FIELDS[dialect]
    )
    assert isinstance(FIELDS[dialect]["session_id"], WithoutEffect)


def test_the_document_has_what_is_accepted_and_nothing_else() -> None:
    schemas, _ = request_schemas(declared())
    for dialect, name in RULES:
        rule = FIELDS[dialect][name]
        shapes = schemas[dialect].get("anyOf", [schemas[dialect]])
        for shape in shapes:
            assert (name in shape["properties"]) == (
                isinstance(rule, WithoutEffect | SameAs | NotAt) or bool(rule.values)
            ), (dialect, name)


def test_the_document_has_no_bound_of_stop_strings_that_is_not_the_server_s() -> None:
    """Catches: vLLM's own, which is far beyond the setting's."""
    schemas, _ = request_schemas(declared())
    found = [
        shape["properties"][name]
        for schema in schemas.values()
        for shape in schema.get("anyOf", [schema])
        for name in ("stop", "stop_sequences")
        if name in shape["properties"]
    ]
    assert len(found) >= 3
    assert "maxItems" not in str(found)


def test_the_page_is_what_the_table_says() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python -m docs.fields"


def test_what_is_said_to_change_nothing_is_a_field_that_is_taken() -> None:
    for endpoint in declared():
        known = {name for model in endpoint.models() for name in model.model_fields}
        assert endpoint.unused <= known, endpoint.name
        assert not endpoint.unused or not endpoint.generates
