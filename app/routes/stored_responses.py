"""What /v1/responses keeps between requests: `store`, `previous_response_id`, item references."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request

from app.endpoints.responses import PATH
from app.errors import ApiError, shorten
from app.http.request_context import context_of
from app.routes.response_store import Item, ResponseStore, StoredResponse
from app.validation.field_checks import invalid

router = APIRouter()

_LAST = ("response.completed", "response.incomplete")
_WITH_RESPONSE = ("response.created", "response.in_progress", *_LAST)


@dataclass(frozen=True)
class Turn:
    """One request on /v1/responses of one tenant, with the turns before it."""

    store: ResponseStore
    tenant: str
    payload: dict[str, Any]  # with all earlier items in `input`
    previous_response_id: str | None
    kept: bool  # whether the response is to be kept
    earlier_bytes: int  # how much JSON the earlier items are

    def finish(self, response: dict[str, Any]) -> dict[str, Any]:
        """The response as the client gets it. It is stored if `kept`, and says whether it was."""
        response = self._named(response, self.kept)
        if not self.kept:
            return response
        stored = StoredResponse(_items(self.payload.get("input")), response)
        if self.store.put(self.tenant, response["id"], stored):
            return response
        return self._named(response, False)

    async def stream(self, events: AsyncIterator[str]) -> AsyncIterator[str]:
        """The events as the client gets them. The response of the last one is stored if `kept`."""
        try:
            async for event in events:
                kind, _, rest = event.removeprefix("event: ").partition("\n")
                if kind not in _WITH_RESPONSE:
                    yield event
                    continue
                data = json.loads(rest.removeprefix("data: "))
                if kind in _LAST:
                    data["response"] = self.finish(data["response"])
                else:
                    data["response"] = self._named(data["response"], self.kept)
                yield f"event: {kind}\ndata: {json.dumps(data)}\n\n"
        finally:
            if hasattr(events, "aclose"):
                await events.aclose()

    def _named(self, response: dict[str, Any], kept: bool) -> dict[str, Any]:
        return {
            **response,
            "previous_response_id": self.previous_response_id,
            "store": kept,
        }


def resume(store: ResponseStore, tenant: str, payload: dict[str, Any]) -> Turn:
    """Put the turns that a request refers to into its input.

    Raises ApiError 400 naming what is not kept here. Fields of a wrong type are left to the checks
    of all fields.
    """
    keep = payload.get("store") is not False and store.limit_bytes > 0
    previous = payload.get("previous_response_id")
    items = payload.get("input")
    earlier: list[Item] = []
    changed: dict[str, Any] = {}
    if isinstance(previous, str) and items is not None:
        stored = store.get(tenant, previous)
        if stored is None:
            raise _missing("response", previous, "previous_response_id", store)
        earlier = [*stored.input, *stored.response["output"]]
        changed = {"previous_response_id": None, "input": [*earlier, *_items(items)]}
    before = len(earlier)
    for index, item in enumerate(items if isinstance(items, list) else ()):
        where = f"input[{index}].id"
        if (item_id := _reference(item, where)) is None:
            continue
        referred = store.item(tenant, item_id)
        if referred is None:
            raise _missing("item", item_id, where, store)
        changed["input"] = [*changed.get("input", items)]
        changed["input"][before + index] = referred
        earlier.append(referred)
    return Turn(
        store,
        tenant,
        {**payload, **changed},
        previous if isinstance(previous, str) else None,
        keep,
        len(json.dumps(earlier)) if earlier else 0,
    )


def _items(value: Any) -> list[Any]:
    """Input as a list of items: a text is a user's message."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    return value if isinstance(value, list) else [value]


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
async def retrieve(request: Request, response_id: str) -> dict[str, Any]:
    """A response that is still kept."""
    return _stored(request, response_id).response


@router.get(f"{PATH}/{{response_id}}/input_items")
async def input_items(request: Request, response_id: str) -> dict[str, Any]:
    """The input that a kept response answered, oldest item first, on one page."""
    items = _stored(request, response_id).input
    ids = [item.get("id") for item in items]
    return {
        "object": "list",
        "data": items,
        "first_id": ids[0] if ids else None,
        "last_id": ids[-1] if ids else None,
        "has_more": False,
    }


@router.delete(f"{PATH}/{{response_id}}")
async def delete(request: Request, response_id: str) -> dict[str, Any]:
    """Forget a response that was kept."""
    store: ResponseStore = request.app.state.responses
    if not store.delete(_tenant(request), response_id):
        raise _unknown(response_id)
    return {"id": response_id, "object": "response", "deleted": True}
