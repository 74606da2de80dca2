"""What processes that the gateway forks have of its sockets."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[3]
SCRIPT = """
import os, socket, time
from app.server.run import close_in_forks
listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname(), timeout=20)
served, _ = listener.accept()
close_in_forks(lambda: [listener.fileno(), served.fileno()])
other = os.open(os.devnull, os.O_RDONLY)
ready, says = os.pipe()
if os.fork() == 0:
    kept = os.fstat(other)  # everything else is still there
    served.close()  # as a destructor may
    os.write(says, b"1")
    time.sleep(600)
os.read(ready, 1)
address = listener.getsockname()
served.close()
listener.close()
print(client.recv(1))
try:
    socket.create_connection(address, timeout=20)
except ConnectionRefusedError:
    print("refused")
os.killpg(0, 9)
"""


def test_a_forked_child_holds_no_socket_open() -> None:
    """A client would wait for the end of an answer, or for its connection to be accepted."""
    done = subprocess.run(
        [sys.executable, "-u", "-c", SCRIPT],
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        timeout=120,
        process_group=0,
    )
    assert done.stdout.split() == ["b''", "refused"]
