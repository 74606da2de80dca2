"""The scheduler that asks a policy for K, and the record of its steps."""
