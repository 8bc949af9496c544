"""One file an optimizer of local steps; the file's name is its name in a spec. A spec that names none has SGD."""
