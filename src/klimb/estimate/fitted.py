"""What cannot be counted, fitted by benchmarks/plan/fit.py on the configs named there; written by it."""

FITTED: dict[str, float] = {
    "process_bytes": 5.198e08,
    "holes_rollout": 1.233,
    "holes_score": 1.606,
    "holes_update": 1.333,
    "decode_products": 0.8899,
    "decode_bytes": 2.346,
    "decode_calls": 2.859,
    "pass_products": 1.126,
    "pass_bytes": 3.113,
    "pass_calls": 1.152,
    "link_bytes": 98.24,
    "products_pace": 1.036e11,
    "moved_pace": 2.618e10,
    "calls_pace": 4.103e05,
}
