"""What cannot be counted, fitted by benchmarks/plan/fit.py on the configs named there; written by it."""

FITTED: dict[str, float] = {
    "process_bytes": 5.462e08,
    "holes_rollout": 0.9553,
    "holes_score": 1.411,
    "holes_update": 1.34,
    "decode_products": 0,
    "decode_bytes": 3.901e-10,
    "decode_calls": 2.745e-05,
    "pass_products": 1.37,
    "pass_bytes": 0,
    "pass_calls": 0.000149,
    "link_bytes": 1.145e-09,
    "rate": 6.892e10,
}
