"""Share a state among processes: each starts from a snapshot and what follows, and changes it conditionally."""

import rollbridge

with rollbridge.connect() as b:
    b.admin.create_stream("sales/config", exist_ok=True)
    json: rollbridge.Codec[dict[str, int]] = rollbridge.Codec.json()
    with b.synchronizer(
        "sales/config", b"limits", {}, lambda state, change: state | change, states=json, updates=json
    ) as limits:
        limits.update(lambda state: [{"max": state.get("max", 0) + 1}])  # asked again if another process was faster
        print(limits.state)
        limits.compact()  # writes a snapshot, so that whoever starts next reads little
