"""Rewards: what a response is worth, and what happens when that cannot be said."""
