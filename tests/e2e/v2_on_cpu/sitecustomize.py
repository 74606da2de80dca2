"""Gives Python processes a Triton driver for the CPU, so that vLLM's V2 model runner starts there.

Run at the start of every interpreter that has this folder on its PYTHONPATH. Kernels run in
Triton's interpreter: set TRITON_INTERPRET=1 as well.
"""

import triton_on_cpu

triton_on_cpu.install()
