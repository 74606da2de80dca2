"""The container's health: 0 once /readyz answers 200, 1 with what it said otherwise.

The port is AERIE_PORT; without one the gateway listens on 8000, or on 8080 as SageMaker wants it.
An argument is another address to look at (`helm test`).
Standard library only, so that a check every few seconds costs little.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence

TIMEOUT_S = 4.0
PORTS = ("8000", "8080")


def main(addresses: Sequence[str] = ()) -> int:
    """Ask /readyz once, on the loopback address unless others are given; returns the exit code."""
    given = os.environ.get("AERIE_PORT", "")
    ports = [given] if given.isdecimal() else PORTS  # Kubernetes may say tcp://10.0.0.1:80
    urls = addresses or [f"http://127.0.0.1:{port}/readyz" for port in ports]
    return 0 if any(healthy(url) for url in urls) else 1


def healthy(url: str) -> bool:
    """Whether the gateway there says that it is ready; prints what it says."""
    # A proxy in the environment is for outgoing requests, not for these.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=TIMEOUT_S) as response:
            print(response.read().decode(errors="replace"))
            return True
    except urllib.error.HTTPError as error:
        print(error.read().decode(errors="replace"), file=sys.stderr)
    except OSError as error:
        print(f"{url}: {error}", file=sys.stderr)
    return False


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
