"""The same program after its move: it reads orders, and writes a bill for each in the same transaction."""

import os

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from rollbridge import Consumer, connect

config = {"bootstrap.servers": os.environ.get("ROLLBRIDGE_BOOTSTRAP_SERVERS", "localhost:9092")}
admin = AdminClient({**config})
for created in admin.create_topics([NewTopic("shop.orders", 4, 1), NewTopic("shop.bills", 4, 1)]).values():
    created.exception()  # they may exist
config["zookeeper"] = os.environ.get("ROLLBRIDGE_ZOOKEEPER", "localhost:2181")
with connect() as b:  # once, or `rollbridge stream adopt shop.orders`
    for topic in ("shop.orders", "shop.bills"):
        b.admin.adopt_topic(topic, partitioner="murmur2", exist_ok=True)

gateway = {"bootstrap.servers": os.environ.get("ROLLBRIDGE_GATEWAY", "localhost:9192")}
producer = Producer({**gateway, "transactional.id": "billing-1", "partitioner": "murmur2_random"})
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
