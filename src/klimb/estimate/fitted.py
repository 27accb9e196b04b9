"""What cannot be counted, fitted by benchmarks/plan/fit.py on the configs named there; written by it."""

FITTED: dict[str, float] = {
    "process_bytes": 5.181e08,
    "holes_rollout": 1.049,
    "holes_score": 1.593,
    "holes_update": 1.182,
    "decode_products": 0.6963,
    "decode_bytes": 2.413,
    "decode_calls": 3.757,
    "pass_products": 1.141,
    "pass_bytes": 2.09,
    "pass_calls": 3.428,
    "link_bytes": 44.9,
    "products_pace": 1.014e11,
    "moved_pace": 2.534e10,
    "calls_pace": 4.162e05,
}
