"""Small programs to copy, each a file by itself; larger ones, and the demonstrations, are in ``demo``."""
