"""What a leader knows and decides, without I/O: the state of its group, effects as values, plans and rules."""
