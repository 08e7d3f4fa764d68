from tests.models.readers.conftest import base

__all__ = ["base"]
