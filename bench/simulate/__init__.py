"""The controller on simulated engines: published tables and moving loads."""
