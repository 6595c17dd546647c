"""Transaction buffers: frames, the table that the fold obeys, savepoints, snapshots. Pure, except snapshot_topic."""
