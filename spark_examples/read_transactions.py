"""Read whole transactions over all streams of a scope, in the order in which they were committed."""

import rollbridge

with rollbridge.connect() as b:
    b.admin.create_stream("sales/orders", segments=2, exist_ok=True)
    b.admin.create_stream("sales/payments", exist_ok=True)
    with b.transaction("sales/orders", "sales/payments", label="checkout") as txn:
        txn.write("sales/orders", key=b"order-7", value=b"placed")
        txn.write("sales/payments", key=b"order-7", value=b"paid")

    with b.transactions("sales", follow=False) as transactions:  # without follow=False it goes on for ever
        for transaction in transactions:
            values = [(record.stream, record.value) for record in transaction.records()]
            print(transaction.order, transaction.label, values)
