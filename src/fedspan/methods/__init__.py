"""One file a method; the file's name is the method's name in a spec. Each docstring holds the box it implements."""
