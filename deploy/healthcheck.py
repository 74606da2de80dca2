"""The container's health: 0 once /readyz answers 200, 1 with what it said otherwise.

Knows the port as the gateway does: AERIE_PORT, or 8000. Standard library only, so that a check
every few seconds costs little.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request

TIMEOUT_S = 4.0


def main() -> int:
    """One look at /readyz on the loopback address."""
    url = f"http://127.0.0.1:{os.environ.get('AERIE_PORT', '8000')}/readyz"
    # A proxy in the environment is for the way out.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=TIMEOUT_S) as response:
            print(response.read().decode(errors="replace"))
            return 0
    except urllib.error.HTTPError as error:
        print(error.read().decode(errors="replace"), file=sys.stderr)
    except OSError as error:
        print(f"{url}: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
