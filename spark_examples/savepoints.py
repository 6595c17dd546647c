"""Go back to a savepoint of an open transaction: here, and in whatever process comes after one that died."""

import os
import signal
from multiprocessing import get_context

import rollbridge


def load() -> None:
    """Write some lines, note how far that is, write more, and die."""
    with rollbridge.connect(client_name="loader-3") as b:
        txn = b.begin("sales/orders", label="2026-03")
        for line in range(3):
            txn.write("sales/orders", key=b"order-3", value=b"line %d" % line)
            txn.savepoint(notes={"next line": b"%d" % (line + 1)})  # returns once the brokers have it
        txn.write("sales/payments", key=b"order-3", value=b"too early")  # a stream joins with its first record
        txn.flush()
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    with rollbridge.connect() as b:
        b.admin.create_stream("sales/orders", segments=2, exist_ok=True)
        b.admin.create_stream("sales/payments", exist_ok=True)
    process = get_context("spawn").Process(target=load)
    process.start()
    process.join()

    with rollbridge.connect(client_name="loader-3") as b:
        txn = b.resume(b.unfinished()[0].transaction)
        last = txn.last_savepoint
        assert last is not None
        txn.rollback_to(last)  # the payment does not count any more
        line = int(last.notes["next line"])
        txn.write("sales/orders", key=b"order-3", value=b"line %d" % line)
        print("went on at line", line, "and committed", txn.commit().records, "records")
