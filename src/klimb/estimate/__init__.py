"""What a run will need, before it is launched: bytes and seconds from counted tensors and operations; no tensors here."""
