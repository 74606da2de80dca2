"""The load generator: HTTP client, arrivals of requests, and figures from their times."""
