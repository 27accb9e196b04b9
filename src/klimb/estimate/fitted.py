"""What cannot be counted, fitted by benchmarks/plan/fit.py on the configs named there; written by it."""

FITTED: dict[str, float] = {
    "process_bytes": 4.0e8,
    "kernel_bytes": 3.0e5,
    "holes_rollout": 1.1,
    "holes_score": 1.1,
    "holes_update": 1.1,
    "decode_products": 1.2,
    "decode_bytes": 1.0e-10,
    "decode_calls": 1.0e-5,
    "pass_products": 1.1,
    "pass_bytes": 1.0e-10,
    "pass_calls": 1.0e-5,
    "link_bytes": 5.0e-10,
    "rate": 6.0e10,
}
