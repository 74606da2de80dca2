"""End-to-end tests: a live gateway, seen from outside through its HTTP interface."""
