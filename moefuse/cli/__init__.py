"""``python -m moefuse``: explain, doctor, warmup, cache. A file for each, :mod:`moefuse.cli.words` for how they are called."""
