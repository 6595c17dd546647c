"""Rolling transactions on real Kafka topics: the client library."""
