"""What happens to the replies of a round, in this order: screen, clip, round, sum, noise (`replies.chain`)."""
