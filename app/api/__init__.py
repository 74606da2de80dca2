"""Routes: what is on the wire. No vllm here; operations come from `app.engine`."""
