"""``moefuse.warmup``: what it measures, and the report of that."""
