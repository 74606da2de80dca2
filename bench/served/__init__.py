"""Benches that drive servers over HTTP: this gateway, or any that speaks OpenAI's API."""
