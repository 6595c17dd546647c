"""The shell: carries effects out on real Kafka and ZooKeeper. It decides nothing about the protocol."""
