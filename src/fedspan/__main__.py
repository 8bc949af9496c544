"""`python -m fedspan`."""

from fedspan.cli.app import main

main()
