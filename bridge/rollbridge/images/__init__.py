"""Container images: which are in use, and stand-ins for official ones where no registry can be reached."""
