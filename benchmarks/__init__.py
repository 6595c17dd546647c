"""Benchmarks: rollbridge beside native Kafka transactions, on the same broker, alternating in the same run."""
