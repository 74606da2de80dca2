"""Routes: what answers on each path. No vllm here; operations come from `app.engine`."""
