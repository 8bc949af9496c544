"""How a data set is divided among clients, one file per partition; their names are in `fedspan.data`."""
