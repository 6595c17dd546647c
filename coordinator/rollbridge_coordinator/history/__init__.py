"""Inputs of a new leader: takeover, snapshots, the commit log, counters, sessions, standby."""
