"""One file a kind of random subspace; the file's name is the projector's name in a spec."""
