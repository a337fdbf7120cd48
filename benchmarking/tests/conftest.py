"""What holds for every test holds here."""

from tests.conftest import pytest_collection_modifyitems

__all__ = ["pytest_collection_modifyitems"]
