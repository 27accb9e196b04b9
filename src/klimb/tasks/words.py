"""The words that task:instructions asks for: the categories share none, and none is a closing word."""

CATEGORIES: dict[str, tuple[str, ...]] = {
    "animals": ("badger", "camel", "donkey", "giraffe", "hamster", "leopard", "monkey", "rabbit", "zebra"),
    "fruits": ("apple", "banana", "cherry", "grape", "lemon", "mango", "papaya", "quince", "tangerine"),
    "tools": ("axe", "chisel", "drill", "hammer", "ladder", "pliers", "ruler", "tongs", "wrench"),
    "cities": ("athens", "berlin", "cairo", "dublin", "geneva", "lisbon", "madrid", "prague", "warsaw"),
}

CLOSINGS = ("done", "end", "finished", "over", "stop", "ready", "complete", "thanks")
