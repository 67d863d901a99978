"""This machine: its environment variables, moefuse's folder in the user's cache, and what is slower here than it could be."""
