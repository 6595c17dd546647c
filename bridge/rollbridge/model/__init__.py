"""The pure model: names, key space, epochs, transactions, frames and their fold. No I/O, clock or threads."""
