"""Write records to a stream, without a transaction; a scale meanwhile is not noticed."""

import rollbridge

with rollbridge.connect() as b:
    b.admin.create_stream("sales/orders", segments=2, exist_ok=True)
    with b.writer("sales/orders") as writer:  # its end waits for what is under way
        futures = [writer.write(b"order-%d" % number, b"placed", headers=[("source", b"web")]) for number in range(3)]
        count = writer.write_all((b"order-%d" % number, b"checked") for number in range(3))  # faster, without futures
    for future in futures:
        print("written at", future.result())  # or raises what kept the record from being written
    print("and", count, "more")
