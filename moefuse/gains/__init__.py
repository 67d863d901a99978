"""``moefuse.benchmark``: a model in eager, with Inductor and with moefuse, in turns."""
