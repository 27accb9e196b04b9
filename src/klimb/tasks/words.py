"""The words that task:instructions asks for: the categories share none, and none is a closing word."""

CATEGORIES: dict[str, tuple[str, ...]] = {
    "animals": (
        "badger", "camel", "donkey", "elephant", "giraffe", "hamster",
        "kangaroo", "leopard", "monkey", "rabbit", "squirrel", "zebra",
    ),
    "fruits": (
        "apple", "banana", "cherry", "grape", "lemon", "mango",
        "nectarine", "papaya", "quince", "raspberry", "tangerine", "watermelon",
    ),
    "tools": (
        "axe", "chisel", "drill", "hammer", "ladder", "pliers",
        "ruler", "saw", "screwdriver", "tongs", "vice", "wrench",
    ),
    "colours": (
        "amber", "black", "crimson", "green", "indigo", "lilac",
        "magenta", "purple", "scarlet", "turquoise", "violet", "yellow",
    ),
    "cities": (
        "athens", "berlin", "cairo", "dublin", "geneva", "havana",
        "lisbon", "madrid", "nairobi", "prague", "tokyo", "warsaw",
    ),
    "sports": (
        "archery", "boxing", "cricket", "fencing", "gymnastics", "hockey",
        "judo", "rowing", "skiing", "swimming", "tennis", "wrestling",
    ),
    "instruments": (
        "accordion", "banjo", "cello", "drum", "flute", "guitar",
        "harp", "oboe", "piano", "trumpet", "ukulele", "violin",
    ),
    "trees": (
        "alder", "beech", "cedar", "elm", "hazel", "juniper",
        "larch", "maple", "oak", "poplar", "spruce", "willow",
    ),
}  # fmt: skip

CLOSINGS = ("done", "end", "finished", "over", "stop", "ready", "complete", "thanks")
