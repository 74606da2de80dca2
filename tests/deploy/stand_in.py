"""Stands for `aerie serve`: the routes that a replica needs, a slow stream, its own process id.

python stand_in.py serve --host H --port P [...] [--served-model-name NAME]
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PIECES = 20
PAUSE_S = 0.02


def option(name: str) -> str:
    return sys.argv[sys.argv.index(name) + 1]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send(200 if self.path in ("/readyz", "/livez") else 404, {"pid": os.getpid()})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        model = {"model": option("--served-model-name")}
        if not body.get("stream"):
            query = {"path": self.path, "key": self.headers.get("Authorization")}
            return self._send(200, {**model, "echo": body, **query, "via": self.headers["Via"]})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for _ in range(PIECES):
            self._chunk(f"data: {json.dumps(model)}\n\n".encode())
            time.sleep(PAUSE_S)
        self._chunk(b"data: [DONE]\n\n")
        return self._chunk(b"")

    def _chunk(self, part: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
        self.wfile.flush()

    def _send(self, status: int, document: object) -> None:
        text = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        """Nothing on the terminal."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(option("--port"))), Handler).serve_forever()
