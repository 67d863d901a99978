"""The version; setuptools reads it here without importing torch."""

__version__ = "0.2.0"
