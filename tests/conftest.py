"""Shapes and types of the maths are checked while tests run; in production they are only read.

One thread, here and in every process a test starts: sums are rounded alike on every machine, and two busy-waiting
threads beside another process are many times slower than one.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"

import jaxtyping
import torch

torch.set_num_threads(1)
jaxtyping.install_import_hook("klimb.algos", "beartype.beartype")

pytest_plugins = ["tests.browser"]
