"""Tests that need a real browser. A package, so that the browser is closed when the last of them has run."""
