"""Which version of tracegrad this is, as its files say it too."""

__version__ = "0.1.0"
