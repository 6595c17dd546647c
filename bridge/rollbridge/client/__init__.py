"""Client: from a record of the application to a frame in the buffer, and from the commit log back to its future.

Records go through ``transaction`` (the application's calls), ``frame_writer`` (segment and batch) and ``sender`` (to
the brokers). Outcomes come through ``outcomes`` (tails the commit log) and ``futures`` (waiters).
"""
