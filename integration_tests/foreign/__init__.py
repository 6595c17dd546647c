"""Clients of Kafka that know nothing of rollbridge: Kafka's own in Java, Flink, and others; each as a process."""
