"""Rules that name what goes wrong in a run: a table of metrics in, findings out. No torch, no files."""
