"""A writer that is killed: it writes numbers in order, makes savepoints, and says of each that the brokers have it."""

from __future__ import annotations

import sys

import rollbridge


def main() -> None:
    """Write until killed; ``label`` finds the transaction, of which the last savepoint says how far it came."""
    servers, zookeeper, root, label, first, second, count = sys.argv[1:]
    with rollbridge.connect(servers, zookeeper=zookeeper, zookeeper_root=root, client_name=label) as b:
        left = b.unfinished()
        if left:
            txn: rollbridge.Transaction = b.resume(left[0].transaction)
            assert isinstance(txn, rollbridge.ResumedTransaction)
            last = txn.last_savepoint
            if last is not None:
                txn.rollback_to(last)
            done = 0 if last is None else int(last.notes["next"])
        else:
            txn, done = b.begin(first, label=label), 0
        for number in range(done, int(count)):
            stream = first if number % 3 else second
            txn.write(stream, key=b"k%d" % (number % 5), value=b"%d" % number)
            if number % 50 == 49:
                found = txn.savepoint(notes={"next": b"%d" % (number + 1)})
                print("saved", number + 1, found.number, flush=True)
        print("committed", txn.commit().records, flush=True)


if __name__ == "__main__":
    main()
