"""The one loop, and all clients on one machine."""
