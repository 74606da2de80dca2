"""Addresses that only this machine can reach."""

from __future__ import annotations

import pytest

from drafters.loopback import is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_addresses_are_this_machines(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "10.0.0.7", "localhost.example.org"])
def test_all_others_are_not(host: str) -> None:
    assert not is_loopback(host)
