"""Routes: what answers on each path. No vllm import; operations come from `app.engine`."""
