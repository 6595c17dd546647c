"""Finish a transaction whose process has died, and ask for its outcome as often as you like."""

import os
import signal
from multiprocessing import get_context

import rollbridge


def load() -> None:
    """Write half of a transaction, and die."""
    with rollbridge.connect(client_name="loader-2") as b:
        txn = b.begin("sales/orders", label="2026-02")
        txn.write("sales/orders", key=b"order-1", value=b"before the crash")
        txn.flush()  # the brokers have it: it survives
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    with rollbridge.connect() as b:
        b.admin.create_stream("sales/orders", segments=2, exist_ok=True)
    process = get_context("spawn").Process(target=load)
    process.start()
    process.join()

    with rollbridge.connect(client_name="loader-2") as b:  # fences the process before it, if it still lives
        for left in b.unfinished():
            txn = b.resume(left.transaction)
            txn.write("sales/orders", key=b"order-2", value=b"after it")
            print("committed", txn.commit().records, "records")
        outcome = b.outcome(label="2026-02")  # the same answer, from any process and for days
        print(outcome.state, "with", outcome.records, "records at", outcome.position)
