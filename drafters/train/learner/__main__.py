"""Runs `aerie learn` without the gateway's modules."""

from __future__ import annotations

import sys

from drafters.train.learner.parent import main

if __name__ == "__main__":
    sys.exit(main())
