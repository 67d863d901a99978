"""The version; setuptools reads it here without importing torch."""

__version__ = "0.1.0"
