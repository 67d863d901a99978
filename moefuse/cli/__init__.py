"""``python -m moefuse``: explain, doctor, warmup, cache. One file for each subcommand, :mod:`moefuse.cli.main` for what they share."""
