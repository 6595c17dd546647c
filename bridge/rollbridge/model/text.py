"""Text of strangers (labels, client names, transactional ids, errors that quote them) as a line of a log or a terminal.

Pure.
"""

from __future__ import annotations


def printable(text: str) -> str:
    """Return the text with everything replaced that is not a visible character or a space.

    That is ends of lines, what begins escape sequences (ESC, C1 controls), and what turns the direction of writing.
    """
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def printable_lines(text: str) -> str:
    """Return the text with each of its lines printable; only line feeds end a line."""
    return "\n".join(printable(line) for line in text.split("\n"))
