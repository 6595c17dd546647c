"""Sockets of a gateway: listeners, connections, dispatch, relay, listing."""
