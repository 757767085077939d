"""`python -m service.cli` is `pagecast`."""

from service.cli import main

main()
