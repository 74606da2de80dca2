"""What /v1/responses keeps between requests: `store`, `previous_response_id`, item references."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from app.endpoints.responses import PATH
from app.errors import ApiError, shorten
from app.http.request_context import context_of
from app.json_structure import Bounds, exceeded
from app.offload import run_sized
from app.routes.response_store import (
    ResponseStore,
    StoredItem,
    StoredResponse,
    json_list,
    to_json,
)
from app.validation.field_checks import invalid
from app.validation.size_limits import check_count

router = APIRouter()

MOST_LISTED = 100  # items on a page, as in OpenAI's API
PART_BYTES = 64 * 1024  # of a page, sent at a time
_UNSUPPORTED = "unsupported_parameter"
_LAST = ("response.completed", "response.incomplete")
_WITH_RESPONSE = ("response.created", "response.in_progress", *_LAST)


@dataclass
class Turn:
    """One request on /v1/responses of one tenant, with the turns before it."""

    store: ResponseStore
    tenant: str
    payload: dict[str, Any]  # with all earlier items in `input`
    size: int  # of the payload, in bytes of JSON
    previous_response_id: str | None
    kept: bool  # whether the response is to be kept
    created: dict[str, Any] | None = None  # the response as a stream began it

    async def finish(self, response: dict[str, Any], size: int = 0) -> dict[str, Any]:
        """The response as the client gets it. It is stored if `kept`, and says whether it was.

        `size` is what is known of its bytes of JSON beside the input's.
        """
        response = self._named(response, self.kept)
        if not self.kept:
            return response
        items = map(_as_listed, _items(self.payload.get("input")))
        stored = await run_sized(self.size + size, StoredResponse.of, items, response)
        if self.store.put(self.tenant, response["id"], stored):
            return response
        return self._named(response, False)

    async def stream(self, events: AsyncIterator[str]) -> AsyncIterator[str]:
        """The events as the client gets them. The response of the last one is stored if `kept`."""
        try:
            async for event in events:
                kind, _, rest = event.removeprefix("event: ").partition("\n")
                if kind not in _WITH_RESPONSE:
                    yield self.failed(event) if kind == "error" else event
                    continue
                data = await run_sized(len(event), json.loads, rest.removeprefix("data: "))
                if kind in _LAST:
                    data["response"] = await self.finish(data["response"])
                else:
                    data["response"] = self._named(data["response"], self.kept)
                if kind == "response.created":
                    self.created = data["response"]
                text = await run_sized(len(event), json.dumps, data)
                yield f"event: {kind}\ndata: {text}\n\n"
        finally:
            if hasattr(events, "aclose"):
                await events.aclose()

    def failed(self, error_event: str) -> str:
        """The `error` event that ends a stream, and a `response.failed` event after it.

        The response is the one of `response.created`; without that event there is none to end. It
        may have been stored already, if a deadline passed while its last event waited for a slow
        reader, and is forgotten: its client is told that it failed.
        """
        if self.created is None:
            return error_event
        self.store.delete(self.tenant, self.created["id"])
        error = json.loads(error_event.partition("data: ")[2])
        # OpenAI's schema has a closed list of codes here; the `error` event has the own one.
        cause = {"code": "server_error", "message": error["message"]}
        response = {**self.created, "status": "failed", "error": cause, "store": False}
        data = {"type": "response.failed", "sequence_number": error["sequence_number"] + 1}
        last = json.dumps({**data, "response": response})
        return f"{error_event}event: response.failed\ndata: {last}\n\n"

    def _named(self, response: dict[str, Any], kept: bool) -> dict[str, Any]:
        return {
            **response,
            # vLLM forgets a format that it holds the output to together with calls, and names its
            # own schema of the calls where it forces them by one.
            "text": {"format": {"type": "text"}, **(self.payload.get("text") or {})},
            "previous_response_id": self.previous_response_id,
            "store": kept,
        }


async def resume(
    store: ResponseStore,
    tenant: str,
    payload: dict[str, Any],
    size: int,
    most_items: int,
    structure: Bounds,
    reserve: Callable[[int], None],
) -> Turn:
    """Put the turns that a request refers to into its input.

    `size` is how many bytes were sent. `reserve` gets the bytes of what is referred to, before any
    of it is parsed. Raises ApiError 400 for what is not kept here, for more than `most_items` items
    and for more JSON than a body may have, 413 for references to more than a tenant may keep, and
    what `reserve` raises. Fields of a wrong type are left to the checks of all fields.
    """
    previous, sent = payload.get("previous_response_id"), payload.get("input")
    previous = previous if isinstance(previous, str) else None
    if isinstance(sent, str | list):
        items = _items(sent)
        earlier = () if previous is None else _conversation(store, tenant, previous)
        what = "items, earlier turns included" if earlier else "items"
        check_count(len(earlier) + len(items), "input", most_items, what)
        references = _references(store, tenant, items)
        if previous is not None or references:
            more = sum(len(item.data) for item in (*earlier, *references.values()))
            reserve(more)
            whole = await run_sized(more, _joined, earlier, items, references, structure)
            payload, size = {**payload, "input": whole}, size + more
            if previous is not None:
                payload["previous_response_id"] = None
    keep = payload.get("store") is not False and store.limit_bytes > 0
    return Turn(store, tenant, payload, size, previous, keep)


def _conversation(store: ResponseStore, tenant: str, response_id: str) -> tuple[StoredItem, ...]:
    stored = store.get(tenant, response_id)
    if stored is None:
        raise _missing("response", response_id, "previous_response_id", store)
    return stored.conversation


def _references(store: ResponseStore, tenant: str, items: list[Any]) -> dict[int, StoredItem]:
    """The stored items that are referred to, by their places in the input.

    An item may be referred to more than once, and counts each time as if it had been sent.
    """
    found: dict[int, StoredItem] = {}
    size = 0
    for index, item in enumerate(items):
        where = f"input[{index}].id"
        if (item_id := _reference(item, where)) is None:
            continue
        stored = store.item(tenant, item_id)
        if stored is None:
            raise _missing("item", item_id, where, store)
        found[index] = stored
        size += len(stored.data)
        if size > store.limit_bytes:
            message = f"The items that 'input' refers to have more than {store.limit_bytes} bytes."
            raise ApiError(413, message, param="input")
    return found


def _joined(
    earlier: tuple[StoredItem, ...],
    items: list[Any],
    references: dict[int, StoredItem],
    structure: Bounds,
) -> list[Any]:
    """The items of earlier turns and those that were sent, with what the latter refer to in place.

    An item is parsed once, however often it is referred to. Raises ApiError 400 if they hold more
    JSON than a body may.
    """
    if exceeded(json_list((*earlier, *references.values())), structure) is not None:
        param = "previous_response_id" if earlier else "input"
        message = (
            f"What '{param}' refers to holds more than {structure.values} JSON values, or more "
            f"than {structure.containers} lists and objects."
        )
        raise invalid(param, message)
    parsed = {item.id: json.loads(item.data) for item in {*references.values()}}
    sent = [
        parsed[references[index].id] if index in references else item
        for index, item in enumerate(items)
    ]
    return [*(json.loads(item.data) for item in earlier), *sent]


def _items(value: Any) -> list[Any]:
    """Input as a list of items: a text is a user's message."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    return value if isinstance(value, list) else [value]


def _as_listed(item: Any) -> Any:
    """An item in the form in which OpenAI lists it: a message has its type, and its text is a
    content part."""
    if not isinstance(item, dict) or "role" not in item:
        return item
    message = {**item, "type": "message"}
    if isinstance(text := item.get("content"), str):
        part: dict[str, Any] = {"type": "input_text", "text": text}
        if item["role"] == "assistant":
            part |= {"type": "output_text", "annotations": []}
        message["content"] = [part]
    return message


def _reference(item: Any, where: str) -> str | None:
    """The id of an item that is referred to instead of sent; None for any other item.

    `where` is the id's place. Raises ApiError 400 if it is no text.
    """
    if not isinstance(item, dict) or item.get("role") is not None:
        return None
    kind, item_id = item.get("type"), item.get("id")
    if kind not in (None, "item_reference") or (kind is None and item_id is None):
        return None
    if item_id is None:
        raise invalid(where, f"Missing required parameter: '{where}'.", "missing_parameter")
    if not isinstance(item_id, str):
        raise invalid(where, f"'{where}' must be a string.")
    return item_id


def _missing(what: str, name: str, param: str, store: ResponseStore) -> ApiError:
    if store.limit_bytes > 0:
        why = (
            f"responses are kept by the gateway that made them, for {store.ttl_s:g} s at most "
            "and until newer ones replace them"
        )
    else:
        why = "this server keeps no responses"
    return ApiError(
        400,
        f"Previous {what} with id '{shorten(name)}' not found: {why}. Send the conversation as "
        "'input' instead.",
        param=param,
        code=f"previous_{what}_not_found",
    )


def _stored(request: Request, response_id: str) -> StoredResponse:
    store: ResponseStore = request.app.state.responses
    stored = store.get(_tenant(request), response_id)
    if stored is None:
        raise _unknown(response_id)
    return stored


def _tenant(request: Request) -> str:
    return context_of(request.scope).identity.tenant.name


def _unknown(response_id: str) -> ApiError:
    return ApiError(
        404, f"Response with id '{shorten(response_id)}' not found.", param="response_id"
    )


@router.get(f"{PATH}/{{response_id}}")
async def retrieve(request: Request, response_id: str) -> Response:
    """A response that is still kept. Raises ApiError 400 if it is asked for as a stream."""
    query = request.query_params
    if query.get("stream", "false").lower() not in ("false", "0"):
        raise invalid("stream", "'stream': a kept response is read whole.", _UNSUPPORTED)
    if "starting_after" in query:
        message = "'starting_after': the events of a response are not kept."
        raise invalid("starting_after", message, _UNSUPPORTED)
    return Response(_stored(request, response_id).body, media_type="application/json")


@router.get(f"{PATH}/{{response_id}}/input_items")
async def input_items(request: Request, response_id: str) -> Response:
    """A page of the input that a kept response answered, the newest item first by default.

    The page is a copy, which shares the bound of all bodies until its reader has it. Raises
    ApiError 429 beyond it.
    """
    items = _stored(request, response_id).input
    ids = _item_ids(response_id, items)
    page = _page(ids, request.query_params)
    size = sum(len(items[place].data) for place in page.places)
    context_of(request.scope).reserve_body_bytes(size)
    content = await run_sized(size, _listed, items, ids, page)
    headers = {"Content-Length": str(len(content))}
    return StreamingResponse(_parts(content), media_type="application/json", headers=headers)


async def _parts(content: bytes) -> AsyncIterator[memoryview]:
    """The content in parts. Each waits until the reader has taken what came before, so that the
    request, and what it holds, lasts as long as its answer is in memory."""
    view = memoryview(content)
    for start in range(0, len(view), PART_BYTES):
        yield view[start : start + PART_BYTES]


@dataclass(frozen=True)
class _Page:
    """Places of items in a list, and whether others come after them."""

    places: Sequence[int]
    has_more: bool


def _page(ids: Sequence[str | None], query: Mapping[str, str]) -> _Page:
    """The page that `limit`, `order` and `after` ask for, as OpenAI documents them. Raises ApiError
    400 for other values."""
    limit, order, after = query.get("limit", "20"), query.get("order", "desc"), query.get("after")
    if re.fullmatch("[0-9]{1,3}", limit) is None or not 1 <= int(limit) <= MOST_LISTED:
        raise invalid("limit", f"'limit' must be a whole number between 1 and {MOST_LISTED}.")
    if order not in ("asc", "desc"):
        raise invalid("order", "'order' must be 'asc' or 'desc'.")
    ordered = range(len(ids)) if order == "asc" else range(len(ids))[::-1]
    start = 0
    if after is not None:
        starts = [start for start, place in enumerate(ordered, 1) if ids[place] == after]
        if not starts:
            raise invalid("after", f"'after': no item of this list has the id '{shorten(after)}'.")
        start = starts[0]
    end = start + int(limit)
    return _Page(ordered[start:end], end < len(ordered))


def _listed(items: Sequence[StoredItem], ids: Sequence[str | None], page: _Page) -> bytes:
    """A page of a kept response's input, as `GET /v1/responses/{id}/input_items` answers: JSON."""
    ends = {"first_id": ids[page.places[0]], "last_id": ids[page.places[-1]]} if page.places else {}
    head = json.dumps({"object": "list", "first_id": None, "last_id": None, **ends})
    more = b', "has_more": ' + (b"true" if page.has_more else b"false")
    listed = [_with_id(items[place], ids[place]) for place in page.places]
    data = b', "data": ' + json_list(listed) + b"}"
    return head.encode().removesuffix(b"}") + more + data


def _item_ids(response_id: str, items: Sequence[StoredItem]) -> list[str | None]:
    """The ids of a response's items. One without an id, or with that of an earlier item, gets one
    of its own, by which a page can begin after it."""
    ids: list[str | None] = []
    seen: set[str] = set()
    for index, item in enumerate(items):
        item_id = item.id
        if (item_id is None and item.data.startswith(b'{"')) or item_id in seen:
            item_id = f"item_{index}_{response_id.removeprefix('resp_')}"
        if item_id is not None:
            seen.add(item_id)
        ids.append(item_id)
    return ids


def _with_id(item: StoredItem, item_id: str | None) -> StoredItem:
    """The item, with an id that it got here in its JSON."""
    if item_id == item.id or item_id is None:
        return item
    if item.id is not None:
        return StoredItem(item_id, to_json({**json.loads(item.data), "id": item_id}))
    data = b'{"id": ' + json.dumps(item_id).encode() + b", " + item.data.removeprefix(b"{")
    return StoredItem(item_id, data)


@router.delete(f"{PATH}/{{response_id}}")
async def delete(request: Request, response_id: str) -> dict[str, Any]:
    """Forget a response that was kept."""
    store: ResponseStore = request.app.state.responses
    if not store.delete(_tenant(request), response_id):
        raise _unknown(response_id)
    return {"id": response_id, "object": "response", "deleted": True}
