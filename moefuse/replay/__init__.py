"""Routing, taken out of a model or put into it.

choices.py opens a graph, calls.py is what its calls ask, blocks.py whose blocks these are in, api.py what users call, words.py how its
errors put things.
"""
