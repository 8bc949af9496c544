"""The command line: one file per command.

A file of this folder whose name does not begin with "_" is a command of that name. It defines one function, `command`:
its parameters are typer's arguments and options, the first line of its docstring is the help text. It parses, calls and
prints, and imports what it calls inside the function, so that `fedspan --help` does not load torch.
"""
