"""The leader of a group: state, effects, the loop, and the interpreter that carries effects out."""
