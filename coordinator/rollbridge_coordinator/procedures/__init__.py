"""Procedures of a leader, as generators of effects. Each must be recoverable after a crash between any two effects."""
