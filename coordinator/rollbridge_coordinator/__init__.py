"""The coordinator: lead transaction groups, decide on their transactions, merge, scale and roll.

The protocol is a set of procedures, in ``commit``, ``streams`` and ``history``: generators that yield effects and
receive their results, with no I/O of their own. ``core.interpreter`` carries the effects out on Kafka and ZooKeeper and
decides nothing.
"""
