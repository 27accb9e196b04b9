"""Models by role, and the passes over them: the only place that shifts."""
