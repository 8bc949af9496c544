"""The command line: one file per command.

A file of this folder whose name does not begin with "_" is a command of that name. It defines one function, `command`:
its parameters are arguments and options, whose help texts are in its docstring. It parses, calls and prints, and
imports what it calls inside the function, so that `fedspan --help` does not load torch.
"""
