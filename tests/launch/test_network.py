"""Addresses of this machine."""

from __future__ import annotations

import sys

import pytest

from zerokit.launch.network import address_towards, interface_of


@pytest.mark.skipif(sys.platform != "linux", reason="other systems are not asked")
def test_an_interface_is_found_by_the_address_that_leads_there() -> None:
    assert interface_of(address_towards("localhost")) == "lo"
    assert interface_of("192.0.2.1") is None  # TEST-NET-1: nobody has it
