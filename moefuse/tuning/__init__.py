"""Choice by measurement: what ``moefuse.warmup`` measures, where it is kept, and what it decides.

Nothing here runs while a model runs. ``store`` is read when a plan of a GPU call is made and when a region is lowered; everything else only
works inside :func:`moefuse.warmup`.
"""
