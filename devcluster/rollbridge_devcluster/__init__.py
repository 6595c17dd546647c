"""The development cluster: real brokers, ZooKeeper servers and coordinators, as processes or in containers.

``rollbridge up`` keeps one as processes of this machine in the user's data directory; tests and demos use clusters that
leave nothing behind (``rollbridge_devcluster.ephemeral``, and ``rollbridge_devcluster.containers``). Clients and
coordinators need nothing of this package.
"""
