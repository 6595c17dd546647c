"""The commit log: control records, commit order, outcomes, ended transactions. Pure."""
