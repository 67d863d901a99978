"""What graphs and code show of experts that no rule has found; what a report says of that is written by ``diagnosis``."""
