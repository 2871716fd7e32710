"""`python -m raysim`: hands over to the command line."""

from raysim.cli import main

if __name__ == "__main__":
    main()
