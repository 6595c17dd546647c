"""Code written for confluent-kafka: the import is another one, and a topic is a stream."""

import rollbridge
from rollbridge import Consumer, Producer

config: dict[str, str] = {}  # "bootstrap.servers" and "zookeeper"; without them, the cluster of `make up`

with rollbridge.connect() as b:
    b.admin.create_stream("sales/orders", segments=2, exist_ok=True)

producer = Producer({**config, "transactional.id": "shop-1"})
producer.init_transactions()
producer.begin_transaction()
for number in range(3):
    producer.produce("sales/orders", key=f"order-{number}", value="placed")
producer.commit_transaction()
producer.close()

consumer = Consumer({**config, "group.id": "shipping", "auto.offset.reset": "earliest"})
consumer.subscribe(["sales/orders"])
placed = 0
while placed < 3:  # a service goes on for ever
    message = consumer.poll(1.0)
    if message is not None and message.error() is None:
        print(message.topic(), message.partition(), message.offset(), message.key(), message.value())
        placed += message.value() == b"placed"
consumer.close()
