"""A small HTTP server in a thread that answers completions as a test tells it to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# `answer(body, attempt)` decides status, headers and document.
Answer = Callable[[dict, int], tuple[int, dict[str, str], object]]


class StubServer:
    """Keeps what was asked: bodies, headers and the most requests at once."""

    def __init__(self, answer: Answer) -> None:
        self.bodies: list[dict] = []
        self.headers: list[dict[str, str]] = []
        self.most = self._running = 0
        lock, server = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    attempt = sum(old["prompt"] == body["prompt"] for old in server.bodies)
                    server.bodies.append(body)
                    server.headers.append({**self.headers, "path": self.path})
                    server._running += 1
                    server.most = max(server.most, server._running)
                status, headers, document = answer(body, attempt)
                data = json.dumps(document).encode()
                with lock:
                    server._running -= 1
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(data))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()
