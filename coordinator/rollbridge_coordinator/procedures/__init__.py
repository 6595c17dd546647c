"""Procedures: what a leader does, as generators of effects. A crash between any two effects must be recoverable."""
