"""The config: one typed schema, its loader, what `auto` becomes, the batch arithmetic and the advice.

Imports neither torch nor transformers; a test holds that.
"""
