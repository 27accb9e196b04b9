"""What a run will need, before it is launched: bytes and seconds from counts; no tensors here."""
