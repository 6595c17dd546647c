"""Share a state among processes: each starts from a snapshot and what follows, and changes it conditionally."""

import rollbridge

State = dict[str, int]


def open_limits(b: rollbridge.Bridge) -> rollbridge.Synchronizer[State, State]:
    """Open the state; every process gives the same function, which makes a state and a change a new state."""
    json: rollbridge.Codec[State] = rollbridge.Codec.json()
    return b.synchronizer(
        "sales/config", b"limits", {}, lambda state, change: state | change, states=json, updates=json
    )


with rollbridge.connect() as b:
    b.admin.create_stream("sales/config", exist_ok=True)
    with open_limits(b) as mine, open_limits(b) as other:
        mine.update(lambda state: [{"max": state.get("max", 0) + 1}])  # asked again if another process was faster
        print(other.fetch())
        mine.compact()  # writes a snapshot, so that whoever starts next reads little
