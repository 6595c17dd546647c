"""Which version this is; also the build reads it here."""

__version__ = "0.3.0.dev0"
