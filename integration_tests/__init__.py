"""Tests that need a real Kafka broker or a real ZooKeeper."""
