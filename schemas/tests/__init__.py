"""Unit tests; they need neither Kafka nor ZooKeeper."""
