"""Defects: errors that the code does not foresee. One kind of log line tells them, to tests and operators alike."""

from __future__ import annotations

import logging
from typing import Final

MARK: Final = "defect: "
"""Beginning of the message of every such line, and of no other."""


def log_defect(logger: logging.Logger, what: str, *args: object, fault: BaseException | None = None) -> None:
    """Log an error that the code does not foresee, with its stack: the present one, or ``fault``."""
    said = what % args if args else what
    logger.error("%s%s", MARK, said, exc_info=True if fault is None else fault, stacklevel=2)
