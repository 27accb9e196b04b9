"""Controlled comparison: runs that differ in one key, side by side."""
