"""What happens to a reply before it leaves a client, and what the server may learn from it."""
