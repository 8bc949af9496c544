"""`python -m fedspan`."""

from fedspan.cli import main

main()
