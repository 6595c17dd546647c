"""The coordinator: leads transaction groups, decides their transactions, merges, scales and rolls.

The protocol is a set of procedures (``rollbridge_coordinator.procedures``): generators that yield effects and receive
their results, with no I/O of their own. The shell carries the effects out on Kafka and ZooKeeper and decides nothing.
"""
