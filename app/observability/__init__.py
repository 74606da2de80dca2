"""The gateway's log and metrics, and /metrics over the lives of several engines."""
