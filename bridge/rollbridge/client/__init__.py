"""The client: from a record that the user writes to a frame in the buffer, and from the commit log back to its future.

The way of a record: ``transaction`` (what the user calls) → ``frame_writer`` (which segment, which batch) → ``sender``
(to the brokers); the way of an outcome: ``outcomes`` (tails the commit log) → ``futures`` (whoever waits).
"""
