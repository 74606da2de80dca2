"""The scheduler that asks a policy for K, and what a step tells it."""
