"""Which version this is; also the build reads it here."""

__version__ = "0.3.0.dev0"


def what_brings(extra: str) -> str:
    """Return how an extra is installed: from the wheel's file, as our name on PyPI is nobody's, or anybody's."""
    return f"pip install './rollbridge-{__version__}-py3-none-any.whl[{extra}]' brings it (in a checkout: '.[{extra}]')"
