"""What cannot be counted, fitted by benchmarks/plan/fit.py on the configs named there; written by it."""

FITTED: dict[str, float] = {
    "process_bytes": 5.576e08,
    "holes_rollout": 0.8376,
    "holes_score": 1.213,
    "holes_update": 1.168,
    "decode_products": 0.3964,
    "decode_bytes": 0.7484,
    "decode_calls": 12.38,
    "pass_products": 1.344,
    "pass_bytes": 0,
    "pass_calls": 23.08,
    "link_bytes": 111.2,
    "products_pace": 1.036e11,
    "moved_pace": 2.548e10,
    "calls_pace": 4.103e05,
}
