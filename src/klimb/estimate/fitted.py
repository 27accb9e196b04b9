"""What cannot be counted, fitted by benchmarks/plan/fit.py on the configs named there; written by it."""

FITTED: dict[str, float] = {
    "process_bytes": 5.175e08,
    "holes_rollout": 1.094,
    "holes_score": 1.529,
    "holes_update": 1.225,
    "decode_products": 0.3328,
    "decode_bytes": 2.522,
    "decode_calls": 5.995,
    "pass_products": 0.9352,
    "pass_bytes": 4.482,
    "pass_calls": 1.43,
    "link_bytes": 55.61,
    "products_pace": 1.043e11,
    "moved_pace": 3.262e10,
    "calls_pace": 4.152e05,
}
