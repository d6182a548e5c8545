"""What browser tests share."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """Take the place of the check of all other tests: Chromium starts and ends its own processes when it sees fit."""
