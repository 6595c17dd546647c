"""The development cluster: a real broker, ZooKeeper server, coordinators and gateway, as processes of this machine.

``rollbridge up`` keeps one in the user's data directory; tests and demos use clusters that leave nothing behind
(``rollbridge_devcluster.ephemeral``). Clients and coordinators need nothing of this package.
"""
