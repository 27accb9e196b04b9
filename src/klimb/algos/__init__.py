"""The maths: pure functions on [B, T] tensors and a mask. No model, no config, no file."""
