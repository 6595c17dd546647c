"""Client: from a record of the application to a frame in the buffer, and from the commit log back to its future.

A record goes through ``transaction`` (what the application calls), ``frame_writer`` (segment and batch) and ``sender``
(to the brokers); an outcome comes through ``outcomes`` (tails the commit log) and ``futures`` (whoever waits).
"""
