"""How a connection is secured: settings of TLS and of who it is, for Kafka and for ZooKeeper."""
