"""A program of confluent-kafka: it reads orders, and writes a bill for each in the same transaction."""

import os

from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic

config = {"bootstrap.servers": os.environ.get("ROLLBRIDGE_BOOTSTRAP_SERVERS", "localhost:9092")}
admin = AdminClient({**config})
for created in admin.create_topics([NewTopic("shop.orders", 4, 1), NewTopic("shop.bills", 4, 1)]).values():
    created.exception()  # they may exist

producer = Producer({**config, "transactional.id": "billing-1", "partitioner": "murmur2_random"})
producer.init_transactions()
producer.begin_transaction()
for number in range(3):
    producer.produce("shop.orders", key=f"order-{number}", value="placed")
producer.commit_transaction()

consumer = Consumer({**config, "group.id": "billing", "auto.offset.reset": "earliest", "enable.auto.commit": False})
consumer.subscribe(["shop.orders"])
billed = 0
while billed < 3:  # a service goes on for ever
    if messages := consumer.consume(10, 1.0):
        producer.begin_transaction()
        for message in messages:
            producer.produce("shop.bills", key=message.key(), value="billed")
        positions = consumer.position(consumer.assignment())
        producer.send_offsets_to_transaction(positions, consumer.consumer_group_metadata())
        producer.commit_transaction()
        billed += len(messages)
print("billed")
consumer.close()
