"""Seeds as functions of what they are for, so that nothing depends on how often a generator was used."""

from __future__ import annotations

from hashlib import blake2b


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from the run's seed and a path of names and numbers; the same on every machine."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
