"""Security of connections: TLS and identities, for Kafka and for ZooKeeper."""
