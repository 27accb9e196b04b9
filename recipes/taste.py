"""A reward with a taste, as a learned one has: it likes lists whose words stand late in the alphabet.

Which words a list names is free as far as the task goes, so that this pulls the policy away from its reference for as
long as something lets it, and makes no answer more right.
"""

import re


def reward(prompt: str, response: str, answer: str | None) -> float:
    """Mean place of the items' first letters, a = 0 and z = 1; 0 for what is no list of two or more."""
    lines = [line for line in response.strip().lower().split("\n") if not line.endswith(":")]
    items = [item.strip() for line in lines for item in re.split("[,;]", re.sub(r"^(?:- |\d+\. )", "", line))]
    places = [ord(item[0]) - ord("a") for item in items[:-1] if item and "a" <= item[0] <= "z"]  # the last line closes
    return sum(places) / (25 * len(places)) if len(places) >= 2 else 0.0
