"""One TCP connection: limits that hold before a request exists, or while it runs.

uvicorn's protocol (uvicorn/protocols/http/httptools_impl.py) limits neither the size of headers nor
the time that a client takes to send them, to send its body, or to read an answer. It does not tell
a running request that its client has gone if another request was pipelined behind it, and it sends
chunks to clients of HTTP/1.0, which cannot read them. It drops the body of a request that offers
another protocol (`Upgrade: h2c`), as Java's HttpClient does by default.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
from array import array
from collections.abc import Callable, Collection
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from app.errors import ApiError
from app.observability import metrics
from app.settings import ServerSettings

# Beyond `body_timeout_s`, at which the application itself answers with a 408. This limit is for a
# client that sends on after its answer, or to a route that reads no body.
BODY_GRACE_S = 5.0
# Seconds for which the input of a refused client is still read and dropped.
LINGER_S = 2.0
# Connections beyond `max_connections` on which public paths are still served: a full gateway is
# healthy, and whoever watches it has to see that.
PUBLIC_CONNECTIONS = 64
EMPTY_LINE = b"\r\n\r\n"
UPGRADE = b"upgrade"
# What a client has to read of a full connection within `write_timeout_s`, if there is so much.
MIN_READ_BYTES = 64 * 1024


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with limits.

    Offers of other protocols (RFC 9110, section 7.8) are not taken up: such a request is one of
    HTTP/1.1 like any other, and the application sees its `upgrade` header.
    """

    def __init__(
        self, limits: ServerSettings, public: Collection[str], *args: Any, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._public = public
        self._public_only = False
        self.parser = _Parser(self)
        self._offers: list[tuple[bytes, bytes]] = []
        self._limits = limits
        self._most_header_bytes = int(limits.max_header_kib * 1024)
        self._in_head = False
        self._head_bytes = 0
        self._field_bytes = 0
        self._frame_bytes = 0
        self._body_bytes = 0
        self._chunk_body_bytes = 0
        self._refusal: ApiError | None = None
        self._refused = False
        self._running: RequestResponseCycle | None = None
        self._timers: dict[str, asyncio.TimerHandle] = {}

    # What comes in

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the deadline of the first headers.

        Beyond `max_connections` some connections are for public paths only; further ones are
        refused at once.
        """
        super().connection_made(transport)
        self._public_only = self._beyond(0)
        if self._beyond(PUBLIC_CONNECTIONS):
            self._refuse_connection()
            self.send_400_response("")
            return
        self._start("head", self._limits.header_timeout_s, self._late_head)

    def data_received(self, data: bytes) -> None:
        """Parse the data, and count what the parser buffers: it reports whole headers only."""
        if self._refused or self.transport.is_closing():
            return
        if not self._busy and not self._timers.keys() & {"head", "body"}:
            self._start("head", self._limits.header_timeout_s, self._late_head)
        in_head, in_body = self._in_head, "body" in self._timers
        self._chunk_body_bytes = 0
        super().data_received(data)
        if self._refused or self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data) if in_head else self._begun_in(data)
            if self._head_bytes > self._most_header_bytes:
                self._refuse(431, self._head_message, "headers")
                self.send_400_response("")
        elif in_body and "body" in self._timers:
            self._frame_bytes += len(data)
            if self._frame_bytes > self._most_header_bytes + self._body_bytes:
                self._refuse(400, "The body has more chunk framing than content.", "framing")
                self.send_400_response("")

    def _begun_in(self, data: bytes) -> int:
        """Bytes of the unfinished head that begins in this chunk, perhaps behind earlier requests.

        A head holds no empty line and no part of a body. If a body holds empty lines, the result is
        too small.
        """
        behind = data.rfind(EMPTY_LINE)
        tail = len(data) if behind < 0 else len(data) - behind - len(EMPTY_LINE)
        return max(0, tail - self._chunk_body_bytes)

    def on_message_begin(self) -> None:
        """Reset the counters for the head of a new request, and start its deadline."""
        super().on_message_begin()
        self._in_head, self._head_bytes, self._field_bytes = True, 0, 0
        if "head" not in self._timers:
            self._start("head", self._limits.header_timeout_s, self._late_head)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count and check a header. Trailers, which come after these checks, are dropped."""
        if not self._in_head:
            return
        super().on_header(name, value)
        self._field_bytes += len(name) + len(value)
        self._check_head()

    def head_without_offers(self) -> bytes:
        """The head that was parsed last, for the parser to read once more: without `upgrade`.

        What it leaves out are headers of the request that begins with these bytes all the same.
        """
        is_offer = [name == UPGRADE for name, _ in self.headers]
        self._offers = list(itertools.compress(self.headers, is_offer))
        version = self.parser.get_http_version().encode()
        lines = [b"%s %s HTTP/%s" % (self.parser.get_method(), self.url, version)]
        lines += [
            b"%s: %s" % header
            for header, offer in zip(self.headers, is_offer, strict=True)
            if not offer
        ]
        return b"\r\n".join(lines) + EMPTY_LINE

    def on_headers_complete(self) -> None:
        """Refuse an oversized head, and one for which there is no connection; start the deadline of
        the body."""
        self._check_head()
        self._public_only = self._public_only and self._beyond(0)
        if self._public_only and self.url.partition(b"?")[0].decode("latin-1") not in self._public:
            self._refuse_connection()
            raise ValueError("refused")  # ends the parsing; data_received then answers
        if self.parser.get_method() == b"CONNECT":
            raise ValueError("no proxy")  # what follows its head would be no HTTP
        if self.parser.should_upgrade():
            return  # the head comes once more, without the offer
        self.headers += self._offers
        self._offers = []
        self._in_head, self._frame_bytes, self._body_bytes = False, 0, 0
        self._stop("head")
        self._start("body", self._limits.body_timeout_s + BODY_GRACE_S, self._late_body)
        super().on_headers_complete()
        if self._public_only:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """Count a part of the body; all else is framing: chunk sizes, extensions, trailers."""
        self._body_bytes += len(body)
        self._chunk_body_bytes += len(body)
        self._frame_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole: stop the deadline of its body."""
        if self._in_head:  # an offer, whose body the parser does not read
            return
        self._stop("body")
        super().on_message_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the running request that its client has gone; uvicorn tells the newest one only."""
        for name in list(self._timers):
            self._stop(name)
        self._unset_keepalive_if_required()  # uvicorn leaves it when the client resets
        self.pipeline.clear()
        running, self._running = self._running, None
        super().connection_lost(exc)
        if running is not None and not running.response_complete:
            running.disconnected = True
            running.message_event.set()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        if cycle.scope["http_version"] == "1.0":
            cycle.__class__ = _UnchunkedCycle
        super()._start_asgi_task(cycle, app)

    # What goes out

    def pause_writing(self) -> None:
        """Start the write deadline: the client has left a full buffer unread."""
        super().pause_writing()
        self._start_write_deadline()

    def resume_writing(self) -> None:
        """Stop the write deadline, if more may be written: the client reads again."""
        self._stop("write")
        self._end_closing()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Answer what cannot be handed to the application with the error envelope, and close."""
        error = self._refusal or ApiError(400, "Not a valid HTTP request.")
        self._refusal = None
        body = json.dumps(error.envelope()).encode()
        head = [
            STATUS_LINE[error.status],
            b"content-type: application/json\r\n",
            b"content-length: %d\r\n" % len(body),
            b"connection: close\r\n\r\n",
        ]
        self._refused = True
        for name in list(self._timers):
            self._stop(name)
        silent = self._busy and not self._give_up_running()
        if not silent:  # or it would land in the middle of the running answer
            self.transport.write(b"".join([*head, body]))
        if silent or self._beyond(0):
            self._end_refused()
            return
        # Closing now would reset the connection if something is unread, and lose the answer.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._start("linger", LINGER_S, self._end_refused)

    def on_response_complete(self) -> None:
        """Complete the response as uvicorn does. If that closes, unsent bytes get a deadline."""
        super().on_response_complete()
        self._end_closing()

    def timeout_keep_alive_handler(self) -> None:
        """Close an idle connection as uvicorn does; its unsent bytes have a deadline."""
        super().timeout_keep_alive_handler()
        self._end_closing()

    # Limits

    def _end_refused(self) -> None:
        self.transport.close()
        self._end_closing()

    def _end_closing(self) -> None:
        if self.transport.is_closing():
            self._start_write_deadline()

    def _give_up_running(self) -> bool:
        """Give up the running request if the refusal can be its answer; returns whether it can.

        It can if that request's own body is at fault and no other answer has begun. The application
        then sees a client that has gone.
        """
        running = self._running
        if running is None or running is not self.cycle:  # what is at fault was sent behind it
            return False
        if running.response_started or not running.more_body:
            return False
        running.disconnected = True
        running.message_event.set()
        return True

    @property
    def _busy(self) -> bool:
        return self._running is not None and not self._running.response_complete

    @property
    def _head_message(self) -> str:
        limits = self._limits
        return (
            f"The request line and headers may have {limits.max_header_kib:g} KiB and "
            f"{limits.max_headers} fields."
        )

    def _check_head(self) -> None:
        size = len(self.url) + self._field_bytes
        if size > self._most_header_bytes or len(self.headers) > self._limits.max_headers:
            self._refuse(431, self._head_message, "headers")
            raise ValueError("refused")  # ends the parsing; data_received then answers

    def _beyond(self, more: int) -> bool:
        """Whether there are more connections than `max_connections` and so many more."""
        return len(self.connections) > self._limits.max_connections + more

    def _refuse_connection(self) -> None:
        self._refuse(503, "Too many connections; try again later.", "connections")

    def _refuse(self, status: int, message: str, reason: str) -> None:
        metrics.CONNECTIONS_REFUSED.labels(reason).inc()
        self._refusal = ApiError(status, message)

    def _start(self, name: str, seconds: float, then: Callable[[], None]) -> None:
        self._stop(name)
        self._timers[name] = self.loop.call_later(seconds, then)

    def _stop(self, name: str) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()

    def _late_head(self) -> None:
        if not self._in_head:  # no request has begun
            self.transport.close()
            self._end_closing()
            return
        if self.flow.read_paused:  # the server does not read yet
            self._start("head", self._limits.header_timeout_s, self._late_head)
            return
        self._refuse(408, "The headers did not arrive in time.", "slow_headers")
        self.send_400_response("")

    def _late_body(self) -> None:
        if self.flow.read_paused:  # the server does not read yet
            self._start("body", self._limits.body_timeout_s + BODY_GRACE_S, self._late_body)
            return
        metrics.CONNECTIONS_REFUSED.labels("slow_body").inc()
        self.transport.abort()

    def _start_write_deadline(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        late = functools.partial(self._late_reader, unsent)
        self._start("write", self._limits.write_timeout_s, late)

    def _late_reader(self, unsent: int) -> None:
        """Abort, unless the client has read enough of the `unsent` bytes."""
        if self.transport.get_write_buffer_size() <= unsent - MIN_READ_BYTES:
            self._start_write_deadline()
            return
        metrics.CONNECTIONS_REFUSED.labels("slow_reader").inc()
        self.transport.abort()


class _Parser(httptools.HttpRequestParser):
    """httptools' parser, which goes on behind the head of a request that offers another protocol.

    httptools takes every offer for taken up and stops behind the head. Here the head is parsed once
    more, without the offer, and what follows is its body: httptools decides how long it is. The
    parser that has stopped is replaced: behind `Connection: close` it would drop everything.
    """

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self._connection = connection
        # As uvicorn sets it: a request behind one that closes the connection gets its answer.
        self.set_dangerous_leniencies(lenient_data_after_close=True)

    def feed_data(self, data: bytes | bytearray | memoryview[int] | array[int]) -> None:
        """Parse a chunk. Raises httptools.HttpParserError."""
        parse, connection = httptools.HttpRequestParser.feed_data, self._connection
        parser, rest = self, memoryview(data)
        while True:
            try:
                parse(parser, rest)
                return
            except httptools.HttpParserUpgrade as offer:
                rest = rest[offer.args[0] :]  # no copy: a chunk may hold thousands of offers
            head = connection.head_without_offers()
            parser = connection.parser = _Parser(connection)
            parse(parser, head)


class _UnchunkedCycle(RequestResponseCycle):
    """A response to a client of HTTP/1.0, which knows no chunks: without a Content-Length the body
    ends with the connection (RFC 9112, section 6.1)."""

    _length_is_told = False

    async def send(self, message: Any) -> None:
        """Send a part of the response."""
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", [])}
            self._length_is_told = b"content-length" in names
            if not self._length_is_told:
                self.chunked_encoding = False
        elif not self._length_is_told:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


def factory(limits: ServerSettings, public: Collection[str] = ()) -> Callable[..., Connection]:
    """The protocol factory for uvicorn: it makes connections with these limits.

    `public` are paths that are served beyond `max_connections`, too.
    """
    return functools.partial(Connection, limits, public)
