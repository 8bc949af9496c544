"""Clients on their own machines: messages, the client and the server, over any transport."""
