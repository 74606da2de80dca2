"""The engine's life cycle: launch, readiness checks, supervision, restarts, calibration.

vllm is imported inside of functions here: the HTTP side answers /livez and /readyz while it is
still being imported.
"""
