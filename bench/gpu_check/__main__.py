"""`python -m bench.gpu_check`, for a machine on which `aerie` is not installed."""

from __future__ import annotations

import sys

from bench.gpu_check.check import main

sys.exit(main(sys.argv[1:]))
