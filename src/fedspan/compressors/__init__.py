"""One file a way to send a vector in fewer bytes; the file's name is the compressor's name in a spec."""
