"""The process: leadership, liveness, succession, health."""
