"""The doctor: looks at a cluster and at the bridge's own state, and says for each finding what to do.

``gather`` reads facts from Kafka and ZooKeeper and changes nothing; ``checks`` turns facts into findings, purely.
"""
