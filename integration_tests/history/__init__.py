"""Recorded histories of whole clusters under faults, and what must hold in them.

``clients`` do things at random and write down what they asked for and what they were told; ``nemesis`` breaks
servers meanwhile; ``final`` reads what stands in Kafka and ZooKeeper in the end; ``checks`` compares, without any input
or output. ``python -m integration_tests.history --minutes 30`` runs for long and prints a report.
"""
