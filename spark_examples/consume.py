"""Read a stream, each key's records in order however it was scaled, and go on later where it was left."""

import rollbridge

with rollbridge.connect() as b:
    b.admin.create_stream("sales/orders", segments=2, exist_ok=True)
    with b.reader("sales/orders", follow=False) as reader:  # also from start="2026-01-31", a DLSN, a saved position
        for record in reader:
            print(record.sn, record.transaction_id, record.key, record.value)
        saved = str(reader.position)

    with b.transaction("sales/orders") as txn:
        txn.write("sales/orders", key=b"order-1", value=b"shipped")

    with b.reader("sales/orders", start=saved, follow=False) as reader:
        print([record.value for record in reader])  # what has come since
