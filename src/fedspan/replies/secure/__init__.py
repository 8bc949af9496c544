"""Secure aggregation: the server learns the sum of the replies of a round, and no single one."""
