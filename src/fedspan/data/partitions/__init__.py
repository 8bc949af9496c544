"""How a data set is divided among clients: one file per partition."""
