"""Doctor: checks of a cluster and of the bridge's own state, with a remedy for each finding.

``facts`` reads Kafka and ZooKeeper and changes nothing; ``checks`` turns facts into findings, purely; ``probes`` tells
whether servers answer; ``repair`` carries out ``rollbridge repair``.
"""
