"""What an API endpoint declares (`Endpoint`), and the checks that are made from it. No vllm import.

The declarations themselves are in `app.endpoints`, one module for each API.
"""
