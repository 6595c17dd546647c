"""Write only if nobody else has meanwhile; it holds against every writer of the segment, whatever client it uses."""

import rollbridge
from rollbridge.errors import CasWriteError

with rollbridge.connect() as b:
    b.admin.create_stream("sales/orders", segments=2, exist_ok=True)
    b.admin.create_stream("sales/payments", exist_ok=True)
    with b.cas_writer("sales/orders") as writer:
        sn = writer.tail(b"order-1")  # what the log ends with, for the segment of this key
        paid = writer.write(b"order-1", b"paid", expected=sn)
        try:
            writer.write(b"order-1", b"cancelled", expected=sn)
        except CasWriteError as refusal:
            print("refused:", refusal.expected, "was expected, the last record is", refusal.actual)
        sent = writer.write(b"order-1", b"sent", expected=paid, scope="key")  # of others, only this key counts

    with b.transaction("sales/orders", "sales/payments") as txn:  # aborted if anybody wrote that key after `sent`
        txn.expect("sales/orders", key=b"order-1", sn=sent, scope="key")
        txn.write("sales/payments", key=b"order-1", value=b"done")
    print("committed at", txn.result().position)
