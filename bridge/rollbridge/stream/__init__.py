"""A stream: names, keys, segments, epochs, positions, conditions. Pure."""
