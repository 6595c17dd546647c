"""The coordinator: lead transaction groups, decide on their transactions, merge, scale and roll.

The protocol is a set of procedures (``rollbridge_coordinator.procedures``): generators that yield effects and receive
their results, with no I/O of their own. The shell (``rollbridge_coordinator.shell``) carries the effects out on Kafka
and ZooKeeper and decides nothing.
"""
