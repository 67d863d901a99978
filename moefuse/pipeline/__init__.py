"""One graph: fuse, or put it back, then say so."""
