"""What cannot be counted, fitted by benchmarks/plan/fit.py on the configs named there; written by it."""

FITTED: dict[str, float] = {
    "process_bytes": 5.513e08,
    "holes_rollout": 0.8028,
    "holes_score": 0.9521,
    "holes_update": 1.031,
    "decode_products": 0,
    "decode_bytes": 2.066e-09,
    "decode_calls": 0,
    "pass_products": 2.82,
    "pass_bytes": 0,
    "pass_calls": 0,
    "link_bytes": 5e-10,
    "rate": 2.715e10,
}
