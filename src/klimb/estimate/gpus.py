"""What is assumed of a GPU: published rates and which share of them is reached. Nothing here was measured by klimb."""

from __future__ import annotations

from klimb.estimate.duration import Speed

PEAK = 312.0e12
"""Operations per second of dense bfloat16 products, NVIDIA A100 80GB (its data sheet); `--rate` replaces it."""
BANDWIDTH = 2.0e12
"""Bytes per second of its memory (the same sheet: 1,935 to 2,039 GB/s)."""
LINK = 300.0e9
"""Bytes per second one way between GPUs of one machine (NVLink of the third generation: 600 GB/s both ways)."""
PRODUCTS_SHARE = 0.4
"""Of the peak, in passes over whole rows: what trainers of such models report."""
BANDWIDTH_SHARE = 0.6
"""Of the memory's and the link's."""
CALL_SECONDS = 1.0e-5
"""From Python to the start of a kernel, when it does nothing else meanwhile; passes of whole rows hide it."""
SOURCE = (
    f"assumed, not measured: an A100's published {PEAK / 1e12:g} TFLOP/s at {PRODUCTS_SHARE:.0%}, its memory's "
    f"{BANDWIDTH / 1e12:g} TB/s and links of {LINK / 1e9:g} GB/s at {BANDWIDTH_SHARE:.0%}"
)


def gpu_speed(peak: float | None = None, separate_engine: bool = False) -> Speed:
    """peak: published operations per second; None: an A100's. separate_engine: decodes without calls from Python."""
    rate = peak or PEAK
    byte = 1 / (BANDWIDTH * BANDWIDTH_SHARE)
    return Speed(
        decode_products=1 / (rate * PRODUCTS_SHARE),
        decode_bytes=byte,
        decode_calls=0.0 if separate_engine else CALL_SECONDS,
        pass_products=1 / (rate * PRODUCTS_SHARE),
        pass_bytes=byte,
        pass_calls=0.0,
        link=1 / (LINK * BANDWIDTH_SHARE),
    )
