"""The pure model: names, key space, epochs, transactions, frames and the fold over them. No I/O, no clock, no threads."""
