"""Optimizers of local steps, one file each; the file name is the name in a spec. The default is `sgd`."""
