"""Kafka's protocol as a gateway speaks it: messages within bounds, versions, errors, batches, sequences. Pure."""
