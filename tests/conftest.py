"""Shapes and types of the maths are checked while tests run; in production they are only read."""

import jaxtyping

jaxtyping.install_import_hook("klimb.algos", "beartype.beartype")
