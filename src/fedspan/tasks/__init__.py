"""One file a task; the file's name is the task's name in a spec."""
