"""A service for the client to ask: that of the tests of the service."""

from tests.service.conftest import bed, home

__all__ = ["bed", "home"]
