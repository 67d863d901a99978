"""Routing, taken out of a model or put into it. choices.py opens a graph, calls.py is what its calls ask, api.py what users call."""
