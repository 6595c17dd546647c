"""Consume, transform and produce exactly once: a group's offsets are committed with the records made of them."""

import rollbridge

ORDER = b"3 apples"

with rollbridge.connect() as b:
    b.admin.create_stream("sales/orders", segments=2, exist_ok=True)
    b.admin.create_stream("sales/invoices", exist_ok=True)
    with b.transaction("sales/orders") as txn:
        txn.write("sales/orders", key=b"order-1", value=ORDER)

    settings = {"group.id": "billing", "auto.offset.reset": "earliest", "enable.auto.commit": False}
    with rollbridge.Consumer(settings) as consumer:
        consumer.subscribe(["sales/orders"])  # segments of later epochs appear by themselves
        values: list[bytes | None] = []
        while ORDER not in values:  # a service goes on for ever
            messages = [message for message in consumer.consume(100, timeout=1) if message.error() is None]
            values = [message.value() for message in messages]
            if messages:
                with b.transaction("sales/invoices") as txn:
                    for message in messages:
                        txn.write("sales/invoices", key=message.key(), value=b"invoice: " + (message.value() or b""))
                    txn.send_offsets(consumer.position(consumer.assignment()), consumer.consumer_group_metadata())
                print(txn.result().records, "invoices")
