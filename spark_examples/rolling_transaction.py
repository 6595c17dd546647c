"""Write a transaction that may stay open for days, while its stream is scaled and others write to it."""

from datetime import timedelta

import rollbridge

with rollbridge.connect(client_name="loader-1") as b:  # the cluster of `make up`, unless another one is named
    b.admin.create_stream("sales/orders", segments=2, exist_ok=True)
    txn = b.begin("sales/orders", timeout=timedelta(days=2), label="2026-01")
    future = txn.write("sales/orders", key=b"order-2", value=b"one")

    first = b.admin.describe("sales/orders").active.segments[0]
    low, high = first.range.low, first.range.high
    halves = [(low, (low + high) / 2), ((low + high) / 2, high)]
    b.admin.scale("sales/orders", seal=[first.id.number], ranges=halves)  # does not wait for the transaction

    txn.write("sales/orders", key=b"order-1", value=b"two", headers=[("source", b"web")])
    result = txn.commit()  # rolls it into the stream's history
    print(result.records, "records, the first one at", future.result())

    with b.transaction("sales/orders") as small:  # commits at its end, or aborts on an exception
        small.write("sales/orders", key=b"order-2", value=b"three")

    print([(epoch.epoch, epoch.cause.value) for epoch in b.admin.history("sales/orders").records])
