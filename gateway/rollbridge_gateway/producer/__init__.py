"""Transactional producers of clients: table, procedures, ids, their transactions."""
