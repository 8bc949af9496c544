"""Ways to move a round's messages. The loop and the client's work are the same in all of them."""
